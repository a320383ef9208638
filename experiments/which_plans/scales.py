"""The second half of the page: many cards, large models, the largest batches, energy."""

from shared.markdown import table
from shared.results import Results, Row

from .answers import named
from .flavours import COMBINED
from .view import NOTHING, View, fits, ms, part_of, rate, times, words

PUBLISHED = (128, 96, 64)  # GPUs that runs of GPT-3 175B were published on
GROUPS = {
    "data": ("data",),
    "ZeRO": ("zero=1", "zero=2", "zero=3"),
    "tensor 1d": ("tensor",),
    "tensor grids": ("tensor=2d", "tensor=2.5d", "tensor=3d"),
    "sequence=ring": ("sequence=ring",),
    "pipeline": ("pipeline=1f1b", "pipeline=gpipe", "pipeline=interleaved", "pipeline=zero_bubble"),
}


def gpt3(results: Results, place: str) -> str:
    rows = results.of("gpt3")
    if not rows:
        return ""
    view, lines = View(results, "gpt3"), []
    for num in view.values("devices"):
        best = view.least(("zero=3", *COMBINED), devices=num)
        if best is None:
            over = min(
                (row for row in rows if row["devices"] == num and "s" in row), key=lambda row: row["gib"], default=None
            )
            least = (
                f"the leanest, {words(over)}, needs {over['gib']:,.0f} of {over['limit']:.0f} GiB" if over else NOTHING
            )
            lines.append([str(num), "none fits", least, *[NOTHING] * 5])
            continue
        zero = view.row("zero=3", devices=num)
        waits = f"{part_of(best, 'tensor', 'data', 'gather', 'pipeline'):.0f} %, {part_of(best, 'bubble'):.0f} %"
        lines.append([str(num), words(best), ms(best), f"{rate(best):,.0f}", f"{100 * best['mfu']:.0f} %", waits,
                      f"{best['gib']:.0f} of {best['limit']:.0f}", ms(zero)])  # fmt: skip
    head = ["cards", "fastest plan", "step, ms", "tokens/s", "MFU", "transfers, idle", "GiB", "`zero=3` alone, ms"]
    fit = sorted(row["devices"] for row in rows if fits(row))
    asked = view.values("devices")
    first = (
        f"The fewest of {', '.join(map(str, asked))} that a plan fits are **{fit[0]}**; published runs took "
        f"{', '.join(map(str, PUBLISHED))}. Parameters, gradients and Adam's state are 16 bytes a parameter in "
        "float32, so "
        "2.8 TB in all: what a plan adds is activations. One that fills its cards to the last percents may not fit "
        "once compiled. " if fit else "No plan fits any of these numbers. "
    )  # fmt: skip
    case = rows[0]
    return (
        f"## GPT-3 175B on few cards\n\nA100 with 80 GB, hosts of 8, batch {case['batch']}. {first}Searched: tensor "
        "1, 2, 4, "
        "8 with and without split positions, 2d:4, 2.5d:8/2 and 3d:8, each beside all pipelines, copies, ZeRO, remat "
        "and "
        f"micro-batches; and ZeRO-3 alone.\n\n{table(head, lines)}"
    )


def numbers(results: Results, place: str) -> str:
    texts = []
    for part, title in (("number", "## GPT-2 on 4, 16 and 64 cards"), ("vit", "## A vision transformer on 64 cards")):
        view = View(results, part)
        if not view:
            continue
        lines = []
        for model in view.values("model"):
            for num in view.values("devices"):
                lines.append(_line(View(results, part, model=model, devices=num)))
        head = ["model", "cards", *GROUPS, "fastest, ms"]
        batch = ", ".join(dict.fromkeys(row["batch"] for row in view.rows if "batch" in row))
        texts.append(
            f"{title}\n\nA100-40GB, hosts of 8 with NVLink, batch {batch}. Each flavour has as many of the cards as "
            "suit it "
            "(2 and up), copies of that the others. Speed in percent of the fastest of the row, and which plan it "
            "is.\n\n"
            f"{table(head, lines)}"
        )
    return "\n\n".join(texts)


def _line(view: View) -> list[str]:
    found = {name: view.least(flavours) for name, flavours in GROUPS.items()}
    best = min((row for row in found.values() if row), key=lambda row: row["s"])
    cells = [NOTHING if row is None else f"{100 * best['s'] / row['s']:.0f}: {words(row)}" for row in found.values()]
    return [named(view.rows[0]), str(view.rows[0]["devices"]), *cells, ms(best)]


def bert(results: Results, place: str) -> str:
    rows, lengths = View(results, "most rows"), View(results, "most length")
    if not rows or not lengths:
        return ""
    texts = []
    for view, said in ((rows, "largest batch at 512 tokens"), (lengths, "longest sequence at batch 64")):
        flavours = view.values("flavour")
        lines = []
        for num in view.values("devices"):
            here = {row["flavour"]: row for row in view.rows if row["devices"] == num}
            lines.append([str(num), *(_most(here.get(flavour)) for flavour in flavours)])
        texts.append(f"**The {said}**:\n\n{table(['cards', *(f'`{f}`' for f in flavours)], lines)}")
    gain = _gain(lengths)
    return (
        "## BERT: the largest batch, the longest sequence\n\nBERT large on A100-40GB, bfloat16, no recomputation, no "
        "micro-batches, weights whole unless the flavour splits them. Solved from memory at two batches and at three "
        f"lengths, so good to a few percent. {gain}The paper on rings has 3.0 times, on 64 cards of 16 "
        "GB. Copies take as long sequences as long as each has a row: rings are for fewer rows than cards.\n\n"
        + "\n\n".join(texts)
        + "\n\nThe same compiled for H100: [Choosing a plan](choosing.md#long-sequences)."
    )


def _gain(lengths: View) -> str:
    """What rings are for."""
    most = max(lengths.values("devices"))
    found = {row["flavour"]: row.get("most") for row in lengths.rows if row["devices"] == most}
    ring, tensor = found.get("sequence=ring"), found.get("tensor")
    return (
        f"On {most} cards a ring takes sequences {times(ring / tensor)} times as long as `tensor`. "
        if ring and tensor
        else ""
    )


def _most(row: Row | None) -> str:
    return NOTHING if row is None or not row.get("most") else f"{row['most']:,}"


def weak(results: Results, place: str) -> str:
    view = View(results, "weak")
    if not view:
        return ""
    numbers, lines = view.values("devices"), []
    for flavour in view.values("flavour"):
        first = view.row(flavour, devices=numbers[0])
        cells = []
        for num in numbers:
            row = view.row(flavour, devices=num)
            kept = f" ({100 * first['s'] / row['s']:.0f} %)" if row and first else ""
            cells.append(NOTHING if row is None else f"{rate(row) / num / 1e3:.1f}{kept}")
        lines.append([f"`{flavour}`", *cells])
    last = view.least(view.values("flavour"), devices=numbers[-1])
    said = f" On {numbers[-1]} cards the fastest is {words(last)}, {ms(last)} ms a step." if last else ""
    return (
        f"## From {numbers[0]} to {numbers[-1]} cards\n\nGPT-2 large, 8 rows of 1,024 tokens a card, A100-40GB, "
        "hosts of 8 with NVLink and 8 adapters of 25 GB/s. Thousands of tokens a second and card, and what is left of "
        f"it.{said} ZeRO "
        "is in groups of a host (`/8`) where that is faster: over all cards its gathers would go round all hosts once "
        f"for each layer.\n\n{table(['flavour', *map(str, numbers)], lines)}\n\n![weak "
        f"scaling]({place}/weak.svg)"
    )


def energy(results: Results, place: str) -> str:
    lines = []
    for card in dict.fromkeys(row["cluster"] for row in results.of("size")):
        view = View(results, "size", cluster=card, model="gpt2-large")
        for flavour in (
            "data",
            "zero=1",
            "zero=3",
            "tensor",
            "sequence=ring",
            "pipeline=1f1b",
            "pipeline=interleaved",
        ):
            row = view.row(flavour)
            if row and row["kwh"]:
                lines.append([card, words(row), f"{rate(row):,.0f}", f"{row['kwh']:.1f}"])
    if not lines:
        return ""
    head = ["cards", "plan", "tokens/s", "kWh for 10^9 tokens"]
    return (
        "## Energy\n\nGPT-2 large on four cards. A card is counted at its full power while it computes and at 30 % "
        "of it "
        "while it waits, hosts and cooling not at all: so the fastest plan is mostly the one that takes the least, and "
        f"one that waits loses less than its time says.\n\n{table(head, lines)}"
    )
