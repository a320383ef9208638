"""Where a cluster keeps what it knows, and what is said of one that is not there."""

from pathlib import Path

import pytest

from cjax.cluster.folder import ClusterFolder, check_name
from cjax.job.files import write_whole
from cjax.job.lock import locked


def test_the_folder_is_the_one_that_was_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CJAX_CLUSTER", str(tmp_path / "of the variable"))
    assert ClusterFolder.of(tmp_path / "given").place == tmp_path / "given"
    assert ClusterFolder.of(None).place == tmp_path / "of the variable"
    monkeypatch.delenv("CJAX_CLUSTER")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert ClusterFolder.of(None).place == tmp_path / "state" / "cjax" / "cluster"


def test_a_cluster_is_there_as_long_as_its_service(tmp_path: Path) -> None:
    folder = ClusterFolder(tmp_path)
    with pytest.raises(RuntimeError, match=f"no cluster was started in {tmp_path}: type cjax cluster start --cluster"):
        folder.alive()
    write_whole(folder.settings, '{"pid": 1}')
    with pytest.raises(RuntimeError, match=f"the cluster of {tmp_path} is gone: .*, and its jobs go on where"):
        folder.alive()
    with locked(tmp_path):
        assert folder.alive() == {"pid": 1}


def test_a_job_has_a_name_that_leads_nowhere_else(tmp_path: Path) -> None:
    folder = ClusterFolder(tmp_path)
    with pytest.raises(ValueError, match="has no job 'a'; none was submitted"):
        folder.known("a")
    folder.job("a").place.mkdir(parents=True)
    write_whole(folder.job("a").submitted, "{}")
    write_whole(tmp_path / "submitted.json", "{}")
    assert folder.known("a").place == tmp_path / "jobs" / "a"
    for name in ("..", "b"):
        with pytest.raises(ValueError, match="has no job .*; there are a"):
            folder.known(name)
    check_name("a-1.b_C")
    for name in ("", "../a", "a/b", "-a", "a" * 65):
        with pytest.raises(ValueError, match="it is of letters, digits"):
            check_name(name)
