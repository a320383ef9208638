"""Plants each fault of `faults.toml` in a copy of the tree and runs the tests that are to notice:
`python tests/planted/run.py`, or `--only 'trace/(stages|attention)'`, or `--unlogged`.

The table of all rows that ran so far is written anew after each, with who noticed. What was noticed with the same file,
the same tests and the same JAX is not run again. A row ends at its third failure; with `--all` every test of it runs,
and tests that failed beside none of the faults are listed at the end: whoever reads them asks what they are there for.
"""

import argparse
import datetime
import hashlib
import importlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

import hypothesis
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))
from planted.table import ROOT, Fault, faults, logged  # noqa: E402

KEPT = ROOT / "build" / "planted.json"
LIMIT = 300  # seconds for the tests of one fault
ENOUGH = 3  # failures, after which no more are counted
PASSED, FAILED, BROKEN, NONE = 0, 1, 2, 5  # exit statuses of pytest
SAID = ("FAILED|ERROR", "PASSED")  # how its last lines begin, one a test


def copy(root: Path, to: Path) -> Path:
    """The tree as git sees it, what is not committed yet included."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=root, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.splitlines():
        if (root / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / name, to / name)
    return to


def prepare() -> None:
    """Imports what all tests import, once: each fault then runs in a fork of this process, which starts no backend.
    What JAX reads when it is imported is set as tests/conftest.py sets it."""
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "JAX_CPU_ENABLE_ASYNC_DISPATCH": "0"}
    for name in ("flax.linen", "flax.nnx", "optax", "orbax.checkpoint", "hypothesis"):
        importlib.import_module(name)
    # What fails need not be made smaller: nobody reads it.
    phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
    hypothesis.settings.register_profile("planted", deadline=None, phases=phases)


def run(
    tests: Sequence[str], root: Path, limit: float, enough: int = ENOUGH
) -> tuple[int | None, list[str], list[str], str]:
    """Pytest's exit status (None if it had to be stopped), the tests that failed, of which `enough` end it (0: none
    does), those that passed, and all that it printed."""
    with tempfile.TemporaryFile("w+") as out, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # JAX's about forks: of this process no backend is there yet
        child = os.fork()
        if child == 0:
            _in_fork(tests, root, out.fileno(), enough)
        status, stop = None, time.monotonic() + limit
        while status is None and time.monotonic() < stop:
            done, code = os.waitpid(child, os.WNOHANG)
            status = os.waitstatus_to_exitcode(code) if done else None
            time.sleep(0.05)
        if status is None:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
        out.seek(0)
        text = out.read()
    failed, passed = (re.findall(rf"^(?:{words}) ((?:tests|cjax)\b.+?)(?: - .*)?$", text, re.M) for words in SAID)
    return status, failed, passed, text


def _in_fork(tests: Sequence[str], root: Path, out: int, enough: int) -> NoReturn:
    status = NONE
    try:
        os.setsid()
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.environ["PYTHONPATH"] = str(root)
        own = {ROOT, ROOT / "tests", Path(__file__).parent}
        sys.path[:] = [str(root), *(path for path in sys.path if Path(path or ".").resolve() not in own)]
        os.chdir(root)
        sys.dont_write_bytecode = any(root.rglob("__pycache__"))  # what is kept is of the files without any fault
        for name in [name for name in sys.modules if name.partition(".")[0] in ("cjax", "planted")]:
            del sys.modules[name]
        options = [
            "-q",
            "--no-header",
            "-p",
            "no:cacheprovider",
            "-rfEp",
            f"--maxfail={enough}",
            "--tb=short",
            "--hypothesis-profile=planted",
            "-W",
            "ignore::pytest.PytestAssertRewriteWarning",
        ]
        status = int(pytest.main([*options, *tests]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def verdict(status: int | None, failed: list[str], output: str) -> list[str]:
    """Who noticed; nobody if the list is empty.

    Raises:
      RuntimeError: when pytest did not get as far as tests: a row whose tests don't exist notices nothing.
    """
    if status == PASSED:
        return []
    if status is None:
        return ["(it does not end)"]
    if status == FAILED or (status == BROKEN and failed):
        return failed
    if status < 0 or status >= 128:
        return ["(the process is aborted)"]
    raise RuntimeError(f"pytest ended with {status}:\n{output[-3000:]}")


def is_known(found: Mapping[str, Any], runs_all: bool) -> bool:
    """Whether a row that ended so need not be run again."""
    return bool(found.get("noticed")) and (not runs_all or "passed" in found)


def ended(fault: Fault, root: Path, runs_all: bool) -> dict[str, Any]:
    """How a row ends: who noticed, in how many seconds, and if all tests of it are run, who did not."""
    sound, start = (root / fault.file).read_text(), time.monotonic()
    (root / fault.file).write_text(fault.planted(root))
    try:
        tests = [*fault.tests, *fault.examples(root)]
        status, failed, passed, output = run(tests, root, LIMIT, 0 if runs_all else ENOUGH)
    finally:
        (root / fault.file).write_text(sound)
    found = {"noticed": verdict(status, failed, output), "seconds": time.monotonic() - start}
    return {**found, "passed": functions(passed)} if runs_all else found


def digest(fault: Fault) -> str:
    """Of all that says how a row ends, as far as a person who mends a test changes it."""
    files = [ROOT / fault.file, *(ROOT / test.partition("::")[0] for test in fault.tests)]
    texts = [repr(fault), metadata.version("jax"), *(file.read_text() for file in files)]
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def kept() -> dict[str, dict[str, Any]]:
    """How rows ended, by digest."""
    return json.loads(KEPT.read_text()) if KEPT.exists() else {}


def short(names: Sequence[str]) -> str:
    """Tests by file and name, without the folder of all tests; of many the first."""
    more = [f"and {len(names) - ENOUGH} more"] if len(names) > ENOUGH else []
    return ", ".join([*(name.removeprefix("tests/") for name in names[:ENOUGH]), *more])


def functions(names: Iterable[str]) -> list[str]:
    """The functions of tests that have a case each for several things: whoever reads them reads the function."""
    return list(dict.fromkeys(name.partition("[")[0] for name in names))


def never_failed(found: Iterable[Mapping[str, Any]]) -> list[str]:
    """Functions of tests that ran beside faults and have failed beside none, from how rows ended with `--all`."""
    found = list(found)
    ran = dict.fromkeys(name for each in found for name in each.get("passed", ()))
    failed = {name for each in found for name in functions(each["noticed"])}
    return sorted(name for name in ran if name not in failed)


def write_log(path: Path, rows: Sequence[Fault], known: Mapping[str, Mapping[str, Any]]) -> None:
    """A line for each row that ran: what was planted, how long its tests took, and who noticed."""
    ran = [(fault, known[digest(fault)]) for fault in rows if digest(fault) in known]
    blind = [fault for fault, found in ran if not found["noticed"]]
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("jax", "flax", "optax"))
    lines = [
        "python tests/planted/run.py: faults planted one at a time, each beside the tests of its own room alone",
        f"{versions}; {len(ran)} of {len(rows)} rows ran, {len(ran) - len(blind)} were noticed, {len(blind)} were not",
        "",
    ]
    for room in dict.fromkeys(fault.room for fault, _ in ran):
        lines.append(room)
        for fault, found in ran:
            if fault.room == room:
                seen = short(found["noticed"]) or f"NOBODY of {', '.join(fault.tests)}"
                lines += [f"  {Path(fault.file).name}: {fault.what} ({found['seconds']:.0f} s)", f"    {seen}"]
        lines.append("")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines))


def fresh_log(folder: Path, name: str) -> Path:
    """Where a log of today goes: behind those that are kept, whose rows nobody may have run in this clone."""
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(path for path in (folder / f"{each}.log" for each in names) if not path.exists())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows in whose file or words this pattern is found")
    parser.add_argument("--unlogged", action="store_true", help="only rows that no kept log says were noticed")
    parser.add_argument("--all", action="store_true", help="run every test of a row, and list those that never fail")
    parser.add_argument("--again", action="store_true", help="run again what has run")
    parser.add_argument("--log", type=Path, help="by default a new one of today in docs/results")
    args = parser.parse_args(argv)
    log = args.log or fresh_log(ROOT / "docs/results", f"planted-{datetime.date.today()}")
    rows = faults()
    known = kept()
    asked = [fault for fault in rows if re.search(args.only, f"{fault.file}: {fault.what}")]
    if args.unlogged:
        done = logged()
        asked = [fault for fault in asked if fault.logged_as not in done]
    # What went unnoticed is run again: whoever asks has mended a test, or another file that it reads.
    todo = {fault: digest(fault) for fault in asked}
    todo = {fault: key for fault, key in todo.items() if args.again or not is_known(known.get(key, {}), args.all)}
    KEPT.parent.mkdir(exist_ok=True)
    prepare()
    with tempfile.TemporaryDirectory() as folder:
        root = copy(ROOT, Path(folder))
        tests = dict.fromkeys(test for fault in todo for test in (*fault.tests, *fault.examples(root)))
        if todo:
            status, failed, _, output = run(list(tests), root, LIMIT * len(todo))
            if status != PASSED:
                print(f"without any fault, these fail: {', '.join(failed) or output[-3000:]}", file=sys.stderr)
                return 2
        for fault, key in todo.items():
            found = ended(fault, root, args.all)
            known = kept() | {key: found}
            KEPT.write_text(json.dumps(known, indent=1))
            print(f"{fault.file}: {fault.what}: {short(found['noticed']) or 'NOBODY'}", flush=True)
            write_log(log, rows, known)
    write_log(log, rows, known)
    if args.all:
        silent = never_failed(known[digest(fault)] for fault in asked)
        print("\n  ".join([f"{len(silent)} tests failed beside none of these {len(asked)} faults:", *silent]))
    blind = [fault for fault, key in todo.items() if not known[key]["noticed"]]
    print(f"{log}: of {len(asked)} rows {len(blind)} went unnoticed")
    return int(bool(blind))


if __name__ == "__main__":
    sys.exit(main())
