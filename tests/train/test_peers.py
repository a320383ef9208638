"""Files that processes give to each other: here three threads, each of which takes itself for a process."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import cjax.train.peers as module
from cjax.train.peers import Peers

PROCESSES = 3


@pytest.fixture
def peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Peers]]:
    here, all_are_there, said = threading.local(), threading.Barrier(PROCESSES), [None] * PROCESSES

    def tell_all(mine: Any) -> list[Any]:
        said[here.rank] = json.loads(json.dumps(mine))
        all_are_there.wait()
        found = list(said)
        all_are_there.wait()
        return found

    def begin(rank: int) -> Peers:
        here.rank = rank
        (tmp_path / str(rank)).mkdir()
        return Peers(tmp_path / str(rank), 2, {"bytes": rank})

    monkeypatch.setattr(module, "tell_all", tell_all)
    monkeypatch.setattr(module, "coordinator_address", lambda: "127.0.0.1:1")
    monkeypatch.setattr(module.jax, "process_index", lambda: here.rank)
    monkeypatch.setattr(module.jax, "process_count", lambda: PROCESSES)
    with ThreadPoolExecutor(PROCESSES) as pool:
        found = list(pool.map(begin, range(PROCESSES)))
    yield found
    for each in found:
        each.close()


def test_a_file_comes_back_from_who_keeps_it(peers: list[Peers], tmp_path: Path) -> None:
    text = bytes(range(256)) * 5000
    for step in (3, 20, 100):
        (tmp_path / "1" / f"{step}-7-1").write_bytes(text + bytes([step]))
        peers[1].put(tmp_path / "1" / f"{step}-7-1")
    assert peers[1].keeper == 2 and peers[2].source == 1 and [each["bytes"] for each in peers[0].told] == [0, 1, 2]
    kept = sorted(each.name for each in (tmp_path / "2" / "peers").iterdir())
    assert kept == ["100-7-1", "20-7-1", "3-7-1"], "a third while it is written"
    (tmp_path / "1" / "101-7-1").write_bytes(b"")
    peers[1].put(tmp_path / "1" / "101-7-1")
    assert not (tmp_path / "2" / "peers" / "3-7-1").exists() and not any((tmp_path / "0").iterdir())
    for each in (tmp_path / "1").iterdir():
        each.unlink()
    peers[1].get(2, tmp_path / "1" / "20-7-1")
    assert (tmp_path / "1" / "20-7-1").read_bytes() == text + bytes([20])
    with pytest.raises(OSError, match="process 2, at 127.0.0.1, is no help: it has no 3-7-1"):
        peers[1].get(2, tmp_path / "1" / "3-7-1")
    assert [each.name for each in (tmp_path / "1").iterdir()] == ["20-7-1"]


@pytest.mark.parametrize(
    "wrong", [{"secret": "guessed"}, {"name": "../../stolen"}, {"secret": 7}, {"bytes": 10}, {"do": "get"}]
)
def test_who_does_not_know_the_secret_or_asks_for_more_gets_nothing(
    peers: list[Peers], tmp_path: Path, wrong: dict[str, Any]
) -> None:
    told = peers[0].told[0]
    assert told["address"][0] == "127.0.0.1"
    asked = {"do": "put", "name": "1-1-2", "bytes": 3, "secret": told["secret"], **wrong}
    with socket.create_connection(tuple(told["address"])) as there:
        there.sendall(json.dumps(asked).encode() + b"\nabc")
        there.shutdown(socket.SHUT_WR)
        answer = there.makefile("rb").read()
    assert answer == (b"none\n" if asked["do"] == "get" else b"")
    assert not [each for each in (tmp_path / "0").rglob("*") if each.is_file()]


def test_whoever_is_gone_is_said(peers: list[Peers], tmp_path: Path) -> None:
    (tmp_path / "1" / "3-7-1").write_bytes(b"abc")
    peers[2].close()
    with pytest.raises(OSError, match="process 2, at 127.0.0.1, is no help: .*refused"):
        peers[1].put(tmp_path / "1" / "3-7-1")


@pytest.mark.parametrize(("hosts", "stride"), [("aabb", 2), ("abab", 1), ("aaaa", 1), ("aab", 1), ("abc", 1)])
def test_files_are_kept_on_another_host_where_that_can_be(hosts: str, stride: int) -> None:
    assert module._stride(hosts) == stride


def test_a_process_listens_where_the_coordinator_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    address: Callable[[list[str]], str] = module._address
    for there in ("127.0.0.1:80", "localhost:80", "[::1]:80", ""):
        monkeypatch.setattr(module, "coordinator_address", lambda there=there: there)
        assert address([]) == "127.0.0.1"
    monkeypatch.setattr(module, "coordinator_address", lambda: "127.0.1.1:80")
    assert address([]).startswith("127.")
    monkeypatch.setattr(
        module.socket.socket, "connect", lambda self, to: self.bind(("127.0.0.1", 0)) or reached.append(to)
    )
    reached: list[Any] = []
    address(["127.0.1.1", "192.0.2.7"])
    assert reached == [("192.0.2.7", 80)]
