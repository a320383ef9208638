"""The whole product of tests, part by part: `python tests/parts.py` goes on where it was stopped.

A part is a folder of tests, a file of tests beside them, a stretch of one that takes long, or the examples in
docstrings. The log of all parts under one JAX is kept with the code and written anew after each part. What is in it and
has passed with the same sources and versions is not run again, also in another checkout: a change to one part's tests
or their data, to docs or to the planted faults leaves what is known of the parts that read none of them.
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
LOGS = "docs/results"
READS = re.compile(r"\bROOT\b|__file__|glob\(")  # how a test looks for files of the repository
SEEN_BY_READERS = ("docs/", "tests/planted/", ".github/")  # and by nobody who only imports
# Files that take from twenty minutes to two hours, in stretches of about ten: whoever is stopped loses no more.
STRETCHES = {"tests/test_checkpoints.py": 3, "tests/test_contract.py": 12, "tests/test_optimizers.py": 6}
NO_TESTS = 5  # pytest's exit status where a part has none of the kind asked for

Results = dict[str, tuple[bool, str, str, str]]  # by part: has it passed, its digest, the day, what pytest printed


def versions() -> str:
    names = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint")
    return f"Python {platform.python_version()}, " + ", ".join(f"{name} {metadata.version(name)}" for name in names)


def listed(root: Path) -> list[str]:
    """The repository's files, those that are not committed yet too."""
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    out = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    return sorted(name for name in set(out.split("\n")) if (root / name).is_file())


def reads_files(root: Path, own: Sequence[str], names: Sequence[str]) -> bool:
    """Whether a part looks for files of this repository, itself or by a module of `tests` that it imports."""
    texts = [(root / name).read_text() for name in own if name.endswith(".py")]
    beside = [Path(name) for name in names if re.fullmatch(r"tests/(?!test_)\w+\.py", name)]
    readers = [path.stem for path in beside if READS.search((root / path).read_text())]
    imports = re.compile(rf"^ *(?:import|from) (?:{'|'.join(readers)})\b", re.M) if readers else None
    return any(READS.search(text) or (imports and imports.search(text)) for text in texts)


def sources(root: Path, part: str) -> str:
    """A digest of all that a part may depend on: other parts' tests and docs only where it reads files."""
    names, path = listed(root), part.partition(":")[0]
    own = [name for name in names if name == path or name.startswith(f"{path}/")]
    reads = reads_files(root, own, names)
    digest = hashlib.sha256()
    for name in names:
        data = name.count("/") > 1 and not name.endswith(".py")
        of_another = name.startswith("tests/") and (data or Path(name).name.startswith("test_"))
        unread = of_another or name.startswith(SEEN_BY_READERS) or name.endswith(".md")
        if name in own or (not name.startswith(f"{LOGS}/") and (reads or not unread)):
            digest.update(name.encode() + b"\0" + (root / name).read_bytes())
    return digest.hexdigest()[:12]


def parts(root: Path) -> list[str]:
    tests = root / "tests"
    folders = {path.relative_to(tests).parts[0] for path in tests.rglob("test_*.py")}
    found = []
    for name in ("cjax", *(f"tests/{name}" for name in sorted(folders))):
        num = STRETCHES.get(name, 1)
        found += [name] if num == 1 else [f"{name}:{at}/{num}" for at in range(1, num + 1)]
    return found


def run(part: str, root: Path, options: Sequence[str]) -> tuple[int, str]:
    path, _, stretch = part.partition(":")
    command = [sys.executable, "-m", "pytest", "--no-header", "-q", *options, path]
    more = {"CJAX_TEST_ALL": "1", "CJAX_TEST_STRETCH": stretch}
    done = subprocess.run(command, cwd=root, env=os.environ | more, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def line_of(output: str) -> str:
    """How pytest sums up."""
    found = re.findall(r"^.*\b(?:passed|failed|errors?|skipped|deselected|ran)\b.* in [\d.]+s.*$", output, re.M)
    return found[-1].strip("= ") if found else "ended without a word"


def write_log(path: Path, head: str, results: Results) -> None:
    """A line for each part; of those that failed, all that was printed."""
    lines = [head, ""]
    lines += [
        f"{'passed' if good else 'FAILED':7} {part:40} {digest} {day} {line_of(text)}"
        for part, (good, digest, day, text) in sorted(results.items())
    ]
    lines += [f"\n{part}\n{text}" for part, (good, _, _, text) in sorted(results.items()) if not good]
    path.write_text("\n".join(lines) + "\n")


def passed(logs: Sequence[Path], head: str) -> Results:
    """What logs say has passed with these versions, later logs before earlier ones."""
    found: Results = {}
    for log in logs:
        if log.is_file() and head in (text := log.read_text()):
            lines = re.findall(r"^passed +(\S+) +([0-9a-f]{12}) (\d{4}-\d\d-\d\d) (.*)$", text, re.M)
            found |= {part: (True, digest, day, said) for part, digest, day, said in lines}
    return found


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2, help="processes that run tests side by side")
    parser.add_argument("--only", help="parts in whose name this pattern is found")
    parser.add_argument("--again", action="store_true", help="run again what has passed")
    parser.add_argument("--log", type=Path, help=f"by default of today and this JAX in {LOGS}")
    args = parser.parse_args(argv)
    head = f"Behind a part the digest of all that it may depend on, and the day. {versions()}"
    today = str(datetime.date.today())
    log = args.log or root / LOGS / f"test-all-{today}-jax-{metadata.version('jax')}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    options = ["-n", str(args.jobs), "--dist", "worksteal"] if args.jobs > 1 else []
    known = passed([*sorted(log.parent.glob(f"test-all-*-jax-{metadata.version('jax')}.log")), log], head)
    results: Results = {}
    for part in parts(root):
        digest = sources(root, part)
        asked = args.only is None or re.search(args.only, part)
        if part in known and known[part][1] == digest and not (asked and args.again):
            results[part] = known[part]
        elif asked:
            start = time.monotonic()
            status, output = run(part, root, options)
            results[part] = status in (0, NO_TESTS), digest, today, output
            print(f"{part}: {line_of(output)} ({time.monotonic() - start:.0f} s)", flush=True)
        write_log(log, head, results)
    missing = len(parts(root)) - len(results)
    print(f"{log}: {sum(good for good, *_ in results.values())} parts passed, "
          f"{sum(not good for good, *_ in results.values())} failed, {missing} not run")  # fmt: skip
    return int(missing > 0 or not all(good for good, *_ in results.values()))


if __name__ == "__main__":
    sys.exit(main())
