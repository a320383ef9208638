"""A Python that has imported JAX, Flax, optax and cjax, and forks for each script: `Forks().run([path, ...], folder)`.

Each script has a process of its own, as if it were started anew, but for the imports: no backend of JAX is started in
the process that forks.
"""

import atexit
import json
import os
import runpy
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class Forks:
    """The process that forks, with these environment variables."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._process: Any = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=dict(environment), text=True
        )

    def run(self, argv: Sequence[str], folder: Path) -> tuple[int, str]:
        """The exit status of the script `argv[0]` run in `folder`, and all that it printed."""
        printed = folder / ".printed"
        self._process.stdin.write(json.dumps({"argv": list(argv), "cwd": str(folder), "out": str(printed)}) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the process that forks is dead"
        return int(answer), printed.read_text()

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def as_main(job: dict[str, Any]) -> int:
    """In the fork: the script's exit status."""
    out = os.open(job["out"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for mine, theirs in ((nothing, 0), (out, 1), (out, 2)):
        os.dup2(mine, theirs)
    os.chdir(job["cwd"])
    sys.argv = job["argv"]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
        return 0
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()


def serve() -> None:
    import flax.linen
    import flax.nnx
    import jax
    import optax

    import cjax

    assert all((flax.linen, flax.nnx, jax, optax, cjax.parallelize))
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            os._exit(as_main(json.loads(line)))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    serve()
