"""The whole product of tests, part by part: `python tests/parts.py` goes on where it was stopped.

A part is a folder of tests, a file of tests beside them, or the examples in docstrings. What has passed with the
same sources and versions is not run again: a change to one part's tests leaves what is known of the others. The log of
all parts, under one JAX, is written anew after each.
"""

import argparse
import datetime
import hashlib
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parent.parent
KEPT = ".test-all"
READS = re.compile(r"\bROOT\b|__file__|glob\(")  # how a test looks for files of the repository
NO_TESTS = 5  # pytest's exit status where a part has none of the kind asked for


def versions() -> str:
    names = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint")
    return f"Python {platform.python_version()}, " + ", ".join(f"{name} {metadata.version(name)}" for name in names)


def sources(root: Path, part: str) -> str:
    """A digest of all that a part may depend on: other parts' tests only if it reads files of this repository."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=root, capture_output=True, text=True, check=True
    )
    own = [name for name in listed.stdout.split("\n") if name == part or name.startswith(f"{part}/")]
    reads = any(
        READS.search((root / name).read_text()) for name in own if name.endswith(".py") and (root / name).is_file()
    )
    digest = hashlib.sha256()
    for name in sorted(listed.stdout.split("\n")):
        path = root / name
        of_another = path.name.startswith("test_") and name.startswith("tests/") and name not in own
        if path.is_file() and not name.startswith(("docs/results/", KEPT)) and (reads or not of_another):
            digest.update(name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def parts(root: Path) -> list[str]:
    tests = root / "tests"
    folders = {path.relative_to(tests).parts[0] for path in tests.rglob("test_*.py")}
    return ["cjax", *(f"tests/{name}" for name in sorted(folders))]


def run(part: str, root: Path, options: Sequence[str]) -> tuple[int, str]:
    command = [sys.executable, "-m", "pytest", "--no-header", "-q", *options, part]
    done = subprocess.run(command, cwd=root, env=os.environ | {"CJAX_TEST_ALL": "1"}, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def line_of(output: str) -> str:
    """How pytest sums up."""
    found = re.findall(r"^.*\b(?:passed|failed|errors?|skipped|deselected|ran)\b.* in [\d.]+s.*$", output, re.M)
    return found[-1].strip("= ") if found else "ended without a word"


def write_log(path: Path, head: str, results: dict[str, tuple[bool, str, str]]) -> None:
    """A line for each part; of those that failed, all that was printed."""
    lines = [head, ""]
    lines += [
        f"{'passed' if good else 'FAILED':7} {part:40} {digest} {line_of(text)}"
        for part, (good, digest, text) in results.items()
    ]
    lines += [f"\n{part}\n{text}" for part, (good, _, text) in results.items() if not good]
    path.write_text("\n".join(lines) + "\n")


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2, help="processes that run tests side by side")
    parser.add_argument("--only", help="parts in whose name this pattern is found")
    parser.add_argument("--again", action="store_true", help="run again what has passed")
    parser.add_argument("--log", type=Path, help="by default of today and this JAX in docs/results")
    args = parser.parse_args(argv)
    head = f"Behind a part the digest of all that it may depend on. {versions()}"
    kept = root / KEPT / hashlib.sha256(versions().encode()).hexdigest()[:12]
    kept.mkdir(parents=True, exist_ok=True)
    log = args.log or root / "docs/results" / f"test-all-{datetime.date.today()}-jax-{metadata.version('jax')}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    options = ["-n", str(args.jobs), "--dist", "worksteal"] if args.jobs > 1 else []
    results: dict[str, tuple[bool, str, str]] = {}
    for part in parts(root):
        digest = sources(root, part)
        passed = kept / f"{part.replace('/', '-')}-{digest}.passed"
        asked = args.only is None or re.search(args.only, part)
        if passed.exists() and not (asked and args.again):
            results[part] = True, digest, passed.read_text()
        elif asked:
            start = time.monotonic()
            status, output = run(part, root, options)
            results[part] = status in (0, NO_TESTS), digest, output
            if results[part][0]:
                passed.write_text(output)
            print(f"{part}: {line_of(output)} ({time.monotonic() - start:.0f} s)", flush=True)
        write_log(log, head, results)
    missing = len(parts(root)) - len(results)
    print(f"{log}: {sum(good for good, *_ in results.values())} parts passed, "
          f"{sum(not good for good, *_ in results.values())} failed, {missing} not run")  # fmt: skip
    return int(missing > 0 or not all(good for good, *_ in results.values()))


if __name__ == "__main__":
    sys.exit(main())
