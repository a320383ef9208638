import importlib.metadata

import pytest

from cjax.cli import main


def test_versions_and_devices(capsys):
    assert main(["check"]) == 0
    text = capsys.readouterr().out
    assert f"jax                  {importlib.metadata.version('jax')}" in text
    assert "devices              8 x cpu" in text


@pytest.mark.parametrize(
    "package, install, status", [("tokenizers", 'pip install "cjax[data]"', 0), ("optax", "pip install cjax", 1)]
)
def test_what_is_missing_and_how_to_install_it(monkeypatch, capsys, package: str, install: str, status: int):
    version = importlib.metadata.version

    def find(name: str) -> str:
        if name == package:
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", find)
    assert main(["check"]) == status
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith(package)]
    assert "missing" in line and line.endswith(install)
