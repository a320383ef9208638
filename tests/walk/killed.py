"""A run of rows on disk that is killed again and again: a command for `test_files.py`.

    python killed.py FOLDER SEED KILLS

Children are forked before a backend starts. Each goes on from what was committed, holds that against the run that
nobody killed, and is killed with -9 at an operation on the folder drawn from the seed: before it, in the middle of what
it writes, or behind it.
"""

import hashlib
import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from cjax.planner.homes import Kind
from cjax.walk.direct import BLOCK
from cjax.walk.files import Folder
from cjax.walk.stores import make_rows

LAYERS, STEPS = 3, 6
SIZE = (6, 500)  # three blocks, of which some may be written
OPERATIONS = ("pwritev", "pwrite", "preadv", "fdatasync", "fsync", "replace", "unlink", "posix_fallocate", "open")


def train(path: Path, expected: list[str] | None, defers: bool) -> list[str]:
    """A digest of all state after each second step, and of what is no row after the others. It is the same where
    updates are due until the next step comes to their layers, or somebody looks."""
    jax.config.update("jax_num_cpu_devices", 2)
    mesh = Mesh(np.array(jax.devices()), ("data",))
    shapes = [
        jax.ShapeDtypeStruct(SIZE, "float32", sharding=NamedSharding(mesh, P("data"))),
        jax.ShapeDtypeStruct((3,), "int32", sharding=NamedSharding(mesh, P())),
    ]

    def array(values: list[np.ndarray]) -> tuple[jax.Array, ...]:
        return tuple(
            jax.device_put(np.array(x, shape.dtype), shape.sharding) for x, shape in zip(values, shapes, strict=True)
        )

    digests = []
    state: list[Kind] = ["params", "opt", "frozen", *(["grads"] if defers else [])]
    with Folder(path, {"model": "toy"}, state=state) as folder:
        params = make_rows(shapes, ["disk"] * LAYERS, "params", folder=folder)
        frozen = make_rows(shapes, ["disk"] * LAYERS, "frozen", folder=folder)
        grads = make_rows(shapes, ["disk"] * LAYERS, "grads", folder=folder)
        known = folder.resume()
        if known is None:
            for layer in range(LAYERS):
                params.put(layer, array([np.full(SIZE, 0.1 + layer), np.arange(3)]))
                frozen.put(layer, array([np.full(SIZE, 1.5 * layer), np.arange(3)]))
            total = np.zeros(4, np.float32)
            known = 0, {"total": total, "due": np.array(False)}
            folder.commit(*known)
        seen = path.with_suffix(".seen")  # steps that a commit has returned for
        assert known[0] >= (int(seen.read_text()) if seen.exists() else 0), "what was committed is lost"
        step, total, made = known[0], known[1]["total"], dict[int, np.ndarray]()
        due = set(range(LAYERS)) if known[1]["due"] else set[int]()

        def update(layer: int) -> None:
            grads.ahead(layer)
            params.ahead(layer)
            g, _ = grads.fetch(layer)
            x, count = params.fetch(layer)
            params.put(layer, array([np.asarray(x) * 2, np.asarray(count)]))  # not the last of this step
            params.put(layer, array([np.asarray(x) - np.float32(0.01) * np.asarray(g), np.asarray(count) + 1]))
            grads.forget(layer)
            due.discard(layer)

        while True:
            looks = step % 2 == 0 or step == STEPS  # somebody does, and has all made that is due
            for layer in tuple(due) if looks else ():
                update(layer)
            digest = hashlib.sha256(total.tobytes())
            for layer in range(LAYERS) if looks else ():
                params.ahead(layer)
                frozen.ahead(layer)
                for x in (*params.fetch(layer), *frozen.fetch(layer)):
                    digest.update(np.asarray(x).tobytes())
            digests.append(digest.hexdigest())
            assert expected is None or digests[-1] == expected[step], f"other bits after step {step}"
            if step == STEPS:
                return digests
            for layer in range(LAYERS):
                if layer in due:
                    update(layer)
                x, _ = params.fetch(layer)
                base, _ = frozen.fetch(layer)
                made[layer] = np.asarray(x) * 0.3 + np.asarray(base) + total[0]
            for layer in reversed(range(LAYERS)):
                grads.put(layer, array([made[layer], np.arange(3)]))
                total = total + made[layer].sum()
            due = set(range(LAYERS))
            for layer in () if defers else range(LAYERS):
                update(layer)
            step += 1
            folder.commit(step, {"total": total, "due": np.array(bool(due))})
            seen.write_text(str(step))


def kill_at(number: int, moment: float) -> None:
    """The process is killed at its operation of this number."""
    count = 0

    def watched(name: str, function: Callable[..., object]) -> Callable[..., object]:
        def run(*args: object, **options: object) -> object:
            nonlocal count
            count += 1
            if count != number:
                return function(*args, **options)
            if moment > 0.5 and name == "pwritev":  # some of it
                handle, (data,), place = args
                function(handle, [data[: int(len(data) * moment) // BLOCK * BLOCK]], place)
            elif moment > 0.7:
                function(*args, **options)
            os.kill(os.getpid(), signal.SIGKILL)
            raise AssertionError("alive")

        return run

    for name in OPERATIONS:
        setattr(os, name, watched(name, getattr(os, name)))


def child(work: Callable[[], object]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            work()
            sys.stdout.flush()
            os._exit(0)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
    status = os.waitpid(pid, 0)[1]
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def main() -> None:
    root, seed, kills = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    chance = random.Random(seed)
    whole = root / "whole.txt"
    assert child(lambda: whole.write_text("\n".join(train(root / "whole", None, False)))) == 0
    expected = whole.read_text().split()
    assert len(set(expected)) == STEPS + 1
    done = runs = 0
    while done < kills:
        folder = root / f"run{runs}"
        runs += 1
        while True:
            number, moment = chance.randrange(1, 120), chance.random()

            def work(
                folder: Path = folder, number: int = number, moment: float = moment, defers: bool = runs % 2 == 1
            ) -> None:
                kill_at(number, moment)
                train(folder, expected, defers)

            status = child(work)
            assert status in (0, -signal.SIGKILL), f"seed {seed}, kill {done} at {number}, {moment}: {status}"
            if status == 0:
                break  # it came to the end, and its last bits were those expected
            done += 1
    print(f"{done} kills, {runs} runs")


if __name__ == "__main__":
    main()
