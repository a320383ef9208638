from pathlib import Path

import pytest

from cjax.cli import main
from cjax.planner.profile import profile_path, read_profile


@pytest.mark.full
def test_rates_are_measured_and_kept(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["calibrate", "--devices", "cpu:8", "--seconds", "0.1"]) == 0
    text = capsys.readouterr().out
    assert (
        f"kept in {profile_path('cpu')}" in text and "matmul float32" in text and "share the processor's cores" in text
    )
    profile = read_profile("cpu")
    assert profile is not None and profile.num_devices == 8 and profile.source in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seconds", "0"], "--seconds 0: give some"),
        (["--devices", "h100:8"], "on which nothing runs"),
        (["--devices", "none"], "write a number"),
        (["--out", "FOLDER"], "is a folder; name a file"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments: list[str], message: str, tmp_path: Path, capsys):
    assert main(["calibrate", *(each.replace("FOLDER", str(tmp_path)) for each in arguments)]) == 1
    assert message in capsys.readouterr().err
