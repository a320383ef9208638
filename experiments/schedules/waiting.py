"""A job of the live run, and of tests: steps that wait as long as so many devices would take, and a state that each of
them changes.

    waiting.py CJAX SECONDS [CODE]: the house; seconds of a step by devices, as JSON; what else is done at each step.

Needs no JAX, so that eight of them can share two cores. Its state is saved at each step, and so are its losses.
"""

import json
import os
import signal
import sys
import time
import types


def after(x: float) -> float:
    """The state that a step makes: another one for each number of steps."""
    return 3.7 * x * (1 - x)


def undisturbed(steps: int) -> list[str]:
    """The losses of a run that nobody disturbs."""
    x, lines = 0.1, []
    for step in range(1, steps + 1):
        x = after(x)
        lines.append(f"{step} {x!r}")
    return lines


def main() -> int:
    cjax = sys.modules["cjax"] = types.ModuleType("cjax")
    cjax.__path__ = [sys.argv[1]]
    from cjax.job import beating, leave_when_told, member

    leave_when_told()
    mine, beat = member(), beating()
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    way = json.loads(os.environ["CJAX_WAY"])
    seconds = json.loads(sys.argv[2])[str(way["devices"])]
    code = sys.argv[3] if len(sys.argv) > 3 else ""
    saved = mine.folder / "saved"
    first, x = json.loads(saved.read_text()) if saved.exists() else (0, 0.1)
    step, due = first, time.monotonic()
    beat.tell(first=first, steps=way["steps"])
    print("place", os.getcwd(), "of", os.environ.get("WHOSE"), flush=True)
    while step < way["steps"] and not told:
        due += seconds
        time.sleep(max(0.0, due - time.monotonic()))
        step, x = step + 1, after(x)
        exec(code, {"step": step})
        if mine.rank == 0:
            with open(mine.folder / "losses", "a") as losses:
                losses.write(f"{step} {x!r}\n")
            unnamed = saved.with_name("saving")
            unnamed.write_text(json.dumps([step, x]))
            unnamed.replace(saved)
        beat.step(step)
    return 75 if told else 0


if __name__ == "__main__":
    sys.exit(main())
