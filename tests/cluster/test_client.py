"""What is refused, with what to type."""

from pathlib import Path

import pytest

from cjax.cluster import logs, start, status, submit
from cjax.cluster.folder import ClusterFolder
from cjax.job.files import write_whole
from cjax.job.lock import locked

from .conftest import WAITING

SPEEDS = "devices,samples_per_second\n1,10\n2,19\n"


@pytest.fixture
def place(tmp_path: Path):
    """A cluster whose service takes nothing up."""
    folder = ClusterFolder(tmp_path / "cluster")
    folder.jobs.mkdir(parents=True)
    write_whole(folder.settings, '{"nodes": {"a": 4}, "card": "cpu", "pid": 1, "grace": 1.0}')
    (tmp_path / "speeds.csv").write_text(SPEEDS)
    with locked(folder.place):
        yield folder.place


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"devices": "8:2"}, "--devices: '8:2' is no range"),
        ({"devices": "9:12"}, "a job here is on 1, 2, 3, 4 devices.*type --devices 1:4"),
        ({"devices": "3:4"}, "--devices 3:4: .*speeds.csv has speeds on 1, 2 devices"),
        ({"steps": 0}, "--steps 0: it is a whole number, at least 1"),
        ({"name": "a/b"}, "--name 'a/b': it is of letters"),
        ({"speeds": None}, "trains by itself.* give --speeds"),
        ({"batch": "8:32"}, "--batch and --rate-rule go together"),
        ({"batch": "8:32", "rate_rule": "cube"}, "--rate-rule cube: it is one of sqrt, linear"),
        ({"batch": "8:32", "rate_rule": "sqrt"}, "--batch is for `train.py:make` without --speeds"),
    ],
)
def test_what_makes_no_sense_is_refused(place: Path, more: dict, said: str) -> None:
    given = {"steps": 5, "devices": "1:2", "speeds": place.parent / "speeds.csv", "cluster": place}
    with pytest.raises(ValueError, match=said):
        submit(str(WAITING), **given | more)


def test_a_name_is_one_jobs(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "word")
    given = {"steps": 5, "devices": "1:2", "speeds": place.parent / "speeds.csv", "cluster": place}
    assert submit(str(WAITING), **given) == "waiting"
    with pytest.raises(ValueError, match="there is a job 'waiting' already .*--name, such as waiting-2"):
        submit(str(WAITING), **given)
    folder = place / "jobs" / "waiting"
    assert folder.stat().st_mode & 0o77 == 0, "its environment is nobody else's"
    assert [job["name"] for job in status(place)["jobs"]] == ["waiting"]
    with pytest.raises(ValueError, match="has no job 'other'; there are waiting"):
        logs("other", cluster=place)


def test_a_script_or_a_cluster_that_is_not_there(place: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no script nothing.py"):
        submit("nothing.py:make", steps=5, devices="1:2", cluster=place)
    with pytest.raises(RuntimeError, match="no cluster was started in .*: type cjax cluster start --cluster"):
        submit(str(WAITING), steps=5, devices="1:2", cluster=tmp_path / "none")
    with pytest.raises(RuntimeError, match="runs already"):
        start({"a": 4}, cluster=place)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"nodes": {}}, "give --nodes 1x8"),
        ({"executor": "slurm"}, "--executor slurm: it is local or ray"),
        ({"address": "10.0.0.1:6379"}, "--address is that of a Ray"),
        ({"period": 0.0}, "--period 0: it is above 0 seconds"),
        ({"card": "h100", "nodes": {"a": 4, "b": 4}}, "are one node: give --nodes 1x8"),
    ],
)
def test_settings_that_can_not_be(tmp_path: Path, more: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        start(**{"nodes": {"a": 2}, "cluster": tmp_path} | more)
