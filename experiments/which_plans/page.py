"""The page: sentences and tables, every number of which comes from the rows."""

from collections.abc import Callable
from pathlib import Path

from shared.results import Results

from .answers import by_batch, by_links, by_model, findings, short
from .pictures import draw
from .scales import bert, energy, gpt3, numbers, weak
from .view import fits, part_of

HEAD = """# Which plan is fastest

Data parallelism, ZeRO, tensor parallelism in four modes, sequences, pipelines: which of them for which model, batch, number of cards and links? Every answer on this page is the planner's, the one behind `plan="auto"`: each flavour with the remat, the micro-batches and the chunks that suit it best, bfloat16, AdamW, and memory that must fit. Ask for your own with `cjax.plans((model, loss, optimizer, batch), "a100-40gb:4")`, or `cjax plan MODEL --target a100-40gb:4 --search`.

**These are predictions. No step on this page was measured.** Behind a step stands, in brackets, the interval that 80 of 100 steps should fall into. How far to trust them is [below](#how-far-to-trust-this). The page and its pictures are written by `experiments/which_plan.py`, and so is the [log]({log}) with every plan, its parts and its memory."""  # noqa: E501

TRUST = """## How far to trust this

- The constants are {source}: decoders of 1 to 1,000 billion parameters, most of them on 8 cards and more. The 80 % interval of a usual plan is {low:.0%} to {high:.0%} of its step. It is of one plan: two plans of one model err together, so that their order is surer than either.
- **Never measured**: PCIe boxes (four cards share a root complex, which the model takes for 32 GB/s each, one way: many boxes have less), A100 with 40 GB, Ethernet below 100 Gb/s, encoders, T5, vision transformers, convolutional nets, and 2D, 2.5D and 3D tensor modes at any size. There the numbers are arithmetic with a decoder's constants.
- Small models and small batches lie at the edge of what was fitted: {overhead}
- A card with less power is counted at the same speed: PCIe cards clock lower under load than this page says, so their steps are somewhat longer and their energy somewhat more.
- Convolutions are counted as matmuls. cuDNN has kernels for few channels that matmuls have not, so that a ResNet is likely faster than said, under every plan alike.
- Compile what you mean to take: `cjax.plans(..., verify=3)` has XLA's own memory and transfers in place of these."""  # noqa: E501

PARTS: tuple[Callable[[Results, str], str], ...] = (
    short, by_model, by_batch, by_links, findings, gpt3, numbers, bert, weak, energy,
)  # fmt: skip


def write_page(results: Results, page: Path, log: Path) -> None:
    """The page, and its pictures in a folder named as the log, beside it."""
    folder = log.with_suffix("")
    draw(results, folder)
    place = folder.relative_to(page.parent).as_posix() if folder.is_relative_to(page.parent) else folder.as_posix()
    page.write_text(page_of(results, place))


def page_of(results: Results, place: str) -> str:
    """Its text, whose log and pictures are at `place`."""
    texts = [HEAD.format(log=f"{place}.log"), *(part(results, place) for part in PARTS), _trust(results)]
    return "\n\n".join(text for text in texts if text) + "\n"


def _trust(results: Results) -> str:
    found = results.of("constants")
    return TRUST.format(**found[0], overhead=_overhead(results)) if found else ""


def _overhead(results: Results) -> str:
    """Of the shortest step."""
    row = min((row for row in results.of("size") if fits(row)), key=lambda row: row["s"], default=None)
    if row is None:
        return "their steps are overhead in part, which is a guess."
    share = part_of(row, "overhead")
    return f"of the shortest step here, {1e3 * row['s']:.0f} ms, {share:.0f} % are overhead that nothing explains."
