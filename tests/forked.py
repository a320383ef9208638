"""A Python that has imported JAX, Flax, optax and cjax, and forks for each script: `Forks().run(["script.py", "arg"])`.

Each script has a process of its own, as if it were started anew with its own environment, but for the imports: no
backend of JAX is started in the process that forks. Scripts are files, or code: `["-c", code, "arg"]`.
"""

import atexit
import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent
MODULES = os.pathsep.join([str(TESTS.parent), str(TESTS)])
Done = subprocess.CompletedProcess[str]
AT_MOST = 600  # seconds for one script


def without_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Without what JAX reads when it is imported, and XLA when a backend starts."""
    return {name: value for name, value in environment.items() if not name.startswith(("JAX_", "XLA_"))}


class Forks:
    """The process that forks; it starts with the first script."""

    def __init__(self) -> None:
        self._process: Any = None

    def run(self, argv: Sequence[str], environment: Mapping[str, str], folder: Path = TESTS.parent) -> Done:
        """What came of the script `argv[0]`, run in `folder` with all of `environment` and nothing else of ours."""
        return self.together([argv], [environment], folder)[0]

    def together(
        self, argvs: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]], folder: Path = TESTS.parent
    ) -> list[Done]:
        """What came of scripts that run at the same time."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                env=without_settings(os.environ) | {"PYTHONPATH": MODULES},
            )  # fmt: skip
        with tempfile.TemporaryDirectory() as printed:
            jobs = [
                {"argv": list(argv), "environment": dict(environment), "cwd": str(folder), "out": f"{printed}/{i}"}
                for i, (argv, environment) in enumerate(zip(argvs, environments, strict=True))
            ]
            self._process.stdin.write(json.dumps(jobs) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
            assert answer, "the process that forks is dead"
            said = [[Path(job["out"] + name).read_text() for name in (".out", ".err")] for job in jobs]
        return [Done(argv, status, *s) for argv, status, s in zip(argvs, json.loads(answer), said, strict=True)]

    def close(self) -> None:
        if self._process is not None:
            self._process.stdin.close()
            self._process.wait()
            self._process.stdout.close()


def set_up(environment: Mapping[str, str]) -> None:
    """In the fork: `environment`, and what a JAX imported with it would have read of it."""
    import jax

    os.environ.clear()
    os.environ.update(environment)
    for name, text in environment.items():
        if name.startswith("JAX_") and name.lower() in jax.config.values:
            jax.config.update(name.lower(), read(text, jax.config.values[name.lower()]))


def read(text: str, before: Any) -> Any:
    """As the setting's own type, which a default of None does not tell."""
    if isinstance(before, bool):
        assert text.lower() in ("0", "1", "false", "true"), text
        return text.lower() in ("1", "true")
    return type(before)(text) if isinstance(before, (int, float)) else text


def as_main(job: dict[str, Any]) -> int:
    """In the fork: the script's exit status."""
    signal.alarm(AT_MOST)
    nothing = os.open(os.devnull, os.O_RDONLY)
    out, err = (os.open(job["out"] + name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) for name in (".out", ".err"))
    for mine, theirs in ((nothing, 0), (out, 1), (err, 2)):
        os.dup2(mine, theirs)
    os.chdir(job["cwd"])
    argv = job["argv"]
    try:
        set_up(job["environment"])
        if argv[0] == "-c":
            sys.argv = ["-c", *argv[2:]]
            sys.modules["__main__"] = main = types.ModuleType("__main__")
            exec(compile(argv[1], "<string>", "exec"), main.__dict__)
        else:
            sys.argv = argv
            sys.path.insert(0, str(Path(argv[0]).parent))
            runpy.run_path(argv[0], run_name="__main__")
        return 0
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)
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

    sys.path.insert(0, str(TESTS))
    from quick import few_collections, few_contexts

    assert all((flax.linen, flax.nnx, jax, optax, cjax.parallelize))
    few_collections()
    few_contexts()
    gc.freeze()  # what was imported is nobody's garbage
    for line in sys.stdin:
        children = []
        for job in json.loads(line):
            child = os.fork()
            if child == 0:
                os._exit(as_main(job))
            children.append(child)
        print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]), flush=True)


if __name__ == "__main__":
    serve()
