"""Random models under random plans, each pair beside one device: `python tests/search/run.py --pairs 200`.

Goes on with seeds that no log in docs/results has. What is wrong is shrunk, and becomes a row of kept.json, which
`make test` runs. The cjax under test is the one on PYTHONPATH.
"""

import argparse
import collections
import copy
import datetime
import json
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from search import models, plans  # noqa: E402
from search.processes import Process  # noqa: E402

RESULTS = HERE.parent.parent / "docs" / "results"
KEPT = HERE / "kept.json"
FAILED = ("wrong", "error", "abort", "hang")
Row = dict[str, Any]


def next_seed(name: str) -> int:
    """Behind the last seed of all logs of a name."""
    found = [0]
    for path in RESULTS.glob(f"{name}-*.log"):
        found += [int(last) + 1 for last in re.findall(r"^seeds \d+ to (\d+)", path.read_text(), re.M)]
    return max(found)


def jobs(seed: int, per_model: int, positions: bool) -> Iterator[tuple[int, Any, list[str]]]:
    while True:
        spec = models.draw(seed, positions)
        stacked = any("stack" in part for part in spec["parts"])
        attends = any("attention" in part["op"] for part in models.parts_of(spec))
        splits_positions = 0.95 if positions else 0.3 if attends else 0.02
        yield seed, spec, plans.draws(seed, per_model, spec["rows"], stacked, splits_positions)
        seed += 1


def signature(row: Row) -> str:
    """What a failure says, without its numbers and names."""
    what = re.sub(r"0x[0-9a-f]+|\d[\d.e+-]*", "#", row["what"])
    what = re.sub(r"\[[^\]]*\]|\([^)]*\)|'[^']*'|`[^`]*`", "_", what)
    if row["kind"] == "wrong":
        return "wrong: " + re.sub(r"step #, ", "", what).split(":")[0].split(" ")[0]
    return f"{row['kind']}: {what[:130]}"


def shrink(process: Process, row: Row, limit: int) -> Row:
    """A smaller model under a simpler plan that fails in the same kind of way."""
    best, tries, changed = row, 0, True

    def attempt(spec: Any, plan: str) -> bool:
        nonlocal best, tries
        if tries >= limit:
            return False
        tries += 1
        found = process.outcomes(spec, [plan], own_init=-1)[0]
        if found["kind"] != row["kind"] or (row["kind"] == "error" and signature(found) != signature(row)):
            return False
        best = best | {"spec": copy.deepcopy(spec), "plan": plan, "what": found["what"]}
        return True

    while changed and tries < limit:
        changed = any(attempt(spec, best["plan"]) for spec in models.smaller(best["spec"]))
        changed |= any(attempt(best["spec"], plan) for plan in plans.simpler(best["plan"]) if plan != best["plan"])
    return best


def ops(spec: Any) -> set[str]:
    return {part["op"] for part in models.parts_of(spec)}


def alike(row: Row, kept: list[Row]) -> Row | None:
    """A row that is kept already and may well have the same cause: the same failure, of no more blocks and words."""
    words = set(plans.kind(row["plan"]).split())
    for other in kept:
        same = other["kind"] == row["kind"] and (row["kind"] == "wrong" or signature(other) == signature(row))
        fewer = set(plans.kind(other["plan"]).split()) - {"data"} <= words
        if same and fewer and ops(other["spec"]) <= ops(row["spec"]):
            return other
    return None


class Search:
    """Counts, and rows that failed; shared by several threads, each with a process of its own."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.lock = args, threading.Lock()
        self.kept: list[Row] = json.loads(KEPT.read_text()) if KEPT.exists() else []
        self.found: list[Row] = []  # by this search: what others have kept is mended, and explains nothing
        self.counts: collections.Counter[str] = collections.Counter()
        self.refused: collections.Counter[str] = collections.Counter()
        self.causes: collections.Counter[str] = collections.Counter()
        self.bad_models: collections.Counter[str] = collections.Counter()
        self.name = "search-positions" if args.positions else "search-models"
        self.jobs = jobs(next_seed(self.name) if args.seed is None else args.seed, args.plans, args.positions)
        self.seeds: set[int] = set()
        self.jax, self.start = "", time.time()
        self.until = self.start + 60 * args.minutes if args.minutes else float("inf")

    def done(self) -> bool:
        return sum(self.counts.values()) >= self.args.pairs or time.time() > self.until

    def stop(self) -> None:
        """Ends behind the models that are under way."""
        self.until = 0.0

    def work(self) -> None:
        process = Process()
        while not self.done():
            with self.lock:
                seed, spec, chosen = next(self.jobs)
            chosen = [plan for plan in chosen if not (self.args.skip and re.search(self.args.skip, plan))]
            for found in process.outcomes(spec, chosen, own_init=seed % 3 - 1):
                self._count(process, {"seed": seed, "spec": spec, **found})
            with self.lock:
                self.jax = process.jax
                self.seeds.add(seed)
                if len(self.seeds) % 10 == 0:
                    self._say(f"{(time.time() - self.start) / 60:.0f} minutes: {dict(self.counts)}")
        process.close()

    def _count(self, process: Process, row: Row) -> None:
        kind = row["kind"]
        with self.lock:
            if kind == "model":
                self.bad_models[f"seed {row['seed']}: {' '.join(row['what'].split())[:150]}"] += 1
                return
            self.counts[kind] += 1
            if kind == "refused":
                self.refused[signature(row)] += 1
            known = alike(row, self.found) if kind in FAILED else None
            if known:
                self.causes[known["id"]] += 1
        if kind not in FAILED or known:
            return
        self._say(f"seed {row['seed']} {row['plan']}: {kind}: {row['what'][:300]}")
        # What dies takes its process along: a minute and more each time.
        small = shrink(process, row, self.args.shrink if kind in ("wrong", "error") else self.args.shrink // 3)
        with self.lock:
            known = alike(small, self.found)
            if known is None:
                number = max((int(r["id"].split()[0]) for r in self.kept), default=0) + 1
                date = datetime.date.today().isoformat()
                name = f"{number} {'+'.join(sorted(ops(small['spec'])))} under {plans.kind(small['plan'])}"
                known = {"id": name, **small, "date": date, "jax": process.jax}
                self.kept.append(known)
                self.found.append(known)
                KEPT.write_text("[\n" + ",\n".join(json.dumps(r) for r in self.kept) + "\n]\n")
            self.causes[known["id"]] += 1
        self._say(f"    shrunk: {known['id']}: {small['kind']} {small['what'][:200]}\n    {small['plan']}\n    "
                  f"{json.dumps(small['spec'])}")  # fmt: skip

    def _say(self, text: str) -> None:
        print(text, flush=True)

    def summary(self) -> str:
        seeds = sorted(self.seeds)
        spread = f"seeds {seeds[0]} to {seeds[-1]}" if seeds else "no seeds"
        lines = [
            f"{spread}, {datetime.date.today()}, JAX {self.jax}, {len(seeds)} models, "
            f"{sum(self.counts.values())} pairs in {(time.time() - self.start) / 60:.0f} minutes",
            "  " + ", ".join(f"{kind} {number}" for kind, number in sorted(self.counts.items())),
        ]
        lines += [f"  failed {number:4}  {cause}" for cause, number in self.causes.most_common()]
        lines += [f"  refused {number:4}  {reason}" for reason, number in self.refused.most_common()]
        lines += [f"  no reference: {what}" for what in self.bad_models]
        return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, help="the first model; by default behind the last of all logs")
    parser.add_argument("--pairs", type=int, default=200, help="how many pairs of a model and a plan")
    parser.add_argument("--plans", type=int, default=10, help="how many plans a model")
    parser.add_argument("--jobs", type=int, default=2, help="how many processes")
    parser.add_argument("--minutes", type=float, help="the most to take")
    parser.add_argument("--shrink", type=int, default=25, help="how many smaller pairs to try for one that fails")
    parser.add_argument("--positions", action="store_true", help="blocks between attentions, split positions")
    parser.add_argument("--skip", help="leave out plans in which this pattern is found")
    parser.add_argument("--log", type=Path, help="by default a file of today in docs/results")
    args = parser.parse_args()
    search = Search(args)
    signal.signal(signal.SIGTERM, lambda *_: search.stop())
    threads = [threading.Thread(target=search.work) for _ in range(args.jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log = args.log or RESULTS / f"{search.name}-{datetime.date.today()}.log"
    with log.open("a") as file:
        file.write(search.summary())
    print(search.summary())
    sys.exit(1 if any(search.counts[kind] for kind in FAILED) else 0)


if __name__ == "__main__":
    main()
