"""What jobs of these tests run: steps that wait, counted in the job's own folder. Needs no JAX.

waiting.py CJAX SECONDS [CODE]: of a step on one device; what a test does at a step.
"""

import json
import os
import signal
import sys
import time
import types


def main() -> int:
    cjax = sys.modules["cjax"] = types.ModuleType("cjax")
    cjax.__path__ = [sys.argv[1]]
    from cjax.job import beating, leave_when_told, member

    leave_when_told()
    mine, beat = member(), beating()
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    way = json.loads(os.environ["CJAX_WAY"])
    rank, world, number = mine.rank, int(os.environ["WORLD_SIZE"]), mine.incarnation
    saved = mine.folder / "saved"
    step = first = int(saved.read_text()) if saved.exists() else 0
    beat.tell(first=first, steps=way["steps"])
    print("place", os.getcwd(), "of", os.environ.get("WHOSE"), way["devices"], "devices", world, flush=True)
    while step < way["steps"] and not told:
        time.sleep(float(sys.argv[2]) / way["devices"])
        step += 1
        exec(sys.argv[3] if len(sys.argv) > 3 else "", {"step": step, "rank": rank, "number": number})
        if rank == 0:
            with open(mine.folder / "losses", "a") as losses:
                losses.write(f"{step} {1 / step:.6f}\n")
            saved.write_text(str(step))
        beat.step(step)
    return 75 if told else 0


if __name__ == "__main__":
    sys.exit(main())
