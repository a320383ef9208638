"""Which flavour of parallelism is the fastest, for which model, batch, number of cards and links: `docs/which-plan.md`.

    python experiments/which_plan.py                           # all that is not in the log yet, then the page
    python experiments/which_plan.py --parts sizes links       # of these questions alone
    python experiments/which_plan.py --parts                   # the page alone

Arithmetic: no devices, nothing compiled, nothing timed. Each row is kept in the log as soon as it is known, one JSON
object a line; a log of its own (`--log`) asks everything again. About 15 minutes of one core, most of it to read the
models, which are as large as they are. Expected: data parallelism with ZeRO first wherever the model fits a card and
links are fast; pipelines first where they are slow.
"""

import argparse
from pathlib import Path

import jax

if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")  # cards are planned for, not looked for

from shared.results import KEPT, Results
from which_plans.page import write_page
from which_plans.settings import PARTS

LOG = KEPT / "which-plan-2026-11-29.log"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", choices=tuple(PARTS), default=list(PARTS), help="questions to ask")
    parser.add_argument("--log", type=Path, default=LOG, help="where rows are kept")
    parser.add_argument("--page", type=Path, default=KEPT.parent / "which-plan.md", help="what is written")
    options = parser.parse_args()
    results = Results(options.log)
    for part in options.parts:
        PARTS[part](results)
    write_page(results, options.page, options.log)


if __name__ == "__main__":
    main()
