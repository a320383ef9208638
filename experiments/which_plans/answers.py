"""The first half of the page: four cards, by model, batch and links, and what the reports found."""

from collections import Counter
from typing import Any

from shared.markdown import table
from shared.results import Results, Row

from .flavours import BEST, FLAVOURS, SEQUENCES
from .view import NOTHING, View, bandwidth, fits, ms, part_of, share, times, words

CARDS = (("a100-40gb", "NVLink"), ("a100-40gb-pcie", "PCIe"))
NAMES = {"gpt2": "GPT-2", "gpt2-medium": "GPT-2 medium", "gpt2-large": "GPT-2 large", "gpt2-xl": "GPT-2 XL",
         "bert-large": "BERT large", "vit-l16": "ViT-L/16", "t5-large": "T5 large", "resnet-50": "ResNet-50",
         "vit-g14": "ViT-g/14", "gpt3-175b": "GPT-3 175B"}  # fmt: skip
FAR = 3.0  # "nearly three times", as the reports have it


def named(row: Row) -> str:
    return str(NAMES.get(row["model"], row["model"]))


def short(results: Results, place: str) -> str:
    lines = []
    for card, links in CARDS:
        view = View(results, "size", cluster=card)
        best = [row for model in view.values("model") if (row := view.row(BEST, model=model))]
        if not best:
            continue
        counts = Counter("data parallelism" if _is_data(row) else words(row) for row in best)
        (most, many), *others = counts.most_common()
        of = f"{many} of {len(best)}" if others else f"all {many}"
        said = "".join(f", {flavour} for {count}" for flavour, count in others)
        lines.append(f"- **Four cards with {links}**: {most} is fastest for {of} models{said}.")
    crossing = _crossing(results, 1.0)
    if crossing is not None:
        lines.append(
            "- **Pipelines** are faster than data parallelism where links are slow: for GPT-2 medium from "
            f"{crossing:g} "
            "GB/s between cards downwards."
        )
    ratios = _tensor_ratios(results)
    if ratios:
        faster = [name for name, ratio in ratios if ratio < 1]
        said = f"faster for {', '.join(faster)}" if faster else "slower"
        lines.append(
            f"- **Tensor parallelism of a model that fits one card** is {said}: {times(min(r for _, r in ratios))} to "
            f"{times(max(r for _, r in ratios))} times the step of data parallelism on the same four cards."
        )
    least = [row for row in View(results, "gpt3").rows if fits(row)]
    if least:
        few = min(least, key=lambda row: (row["devices"], row["s"]))
        lines.append(
            f"- **GPT-3 175B** fits {few['devices']} A100 with 80 GB, by prediction: {few['gib']:.1f} of "
            f"{few['limit']:.1f} GiB; published runs took 64 to 128."
        )
    return "## In short\n\n" + "\n".join(lines) if lines else ""


def _is_data(row: Row) -> bool:
    return not any(f"{word}=" in row["plan"] for word in ("tensor", "sequence", "pipeline"))


# -- by model ----------------------------------------------------------------
def by_model(results: Results, place: str) -> str:
    texts = []
    for card, links in CARDS:
        view = View(results, "size", cluster=card)
        models = view.values("model")
        if models:
            texts.append(_models(view, models, links))
    if not texts:
        return ""
    pictures = "\n\n".join(f"![{name}]({place}/size-{name}.svg)" for name in ("nvlink", "pcie"))
    return "\n\n".join(["## By model, on four cards", *texts, pictures, _refused(results)])


def _models(view: View, models: list[str], links: str) -> str:
    head = ["flavour", *(NAMES.get(model, model) for model in models)]
    lines = []
    for flavour in FLAVOURS:
        cells = [share(view.row(flavour, model=m), view.row(BEST, model=m)) for m in models]
        if any(cell != NOTHING for cell in cells):
            lines.append([f"`{flavour}`", *cells])
    lines.append(["**fastest plan**", *(words(view.row(BEST, model=m)) for m in models)])
    lines.append(["its step, ms", *(ms(view.row(BEST, model=m)) for m in models)])
    batches = ", ".join(f"{NAMES.get(row['model'], row['model'])} {row['batch']}" for m in models
                        if (row := view.row(BEST, model=m)))  # fmt: skip
    return (
        f"**A100-40GB, {links}**: speed in percent of the fastest plan of all, each flavour over all four cards; "
        f"`-` where there is no such plan or none fits.\n\n{table(head, lines)}\n\nBatches: {batches}."
    )


def _refused(results: Results) -> str:
    """Why some flavours have no number."""
    reasons: dict[str, list[str]] = {}
    for row in View(results, "size", cluster=CARDS[0][0]).rows:
        if "refused" in row:
            reasons.setdefault(row["refused"].rstrip("."), []).append(f"{named(row)} `{row['flavour']}`")
    said = [f"- {_several(who)}: {why}." for why, who in reasons.items() if "no such arrangement" not in why]
    none = sorted(
        {row["flavour"] for row in View(results, "size").rows if "no such arrangement" in row.get("refused", "")}
    )
    first = (
        f"- {', '.join(f'`{flavour}`' for flavour in none)}: four cards make no such grid; they need 8." if none else ""
    )
    return "Where there is no plan:\n\n" + "\n".join([*([first] if first else []), *said])


def _several(names: list[str]) -> str:
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


# -- by batch and links ----------------------------------------------------------------
def _shares(view: View, by: str, values: list[Any], head: list[str]) -> str:
    flavours = [each for each in view.values("flavour") if each != BEST]
    lines = []
    for flavour in flavours:
        lines.append(
            [f"`{flavour}`", *(share(view.row(flavour, **{by: v}), view.row(BEST, **{by: v})) for v in values)]
        )
    lines.append(["fastest plan", *(words(view.row(BEST, **{by: v})) for v in values)])
    lines.append(["its step, ms", *(ms(view.row(BEST, **{by: v})) for v in values)])
    return table(head, lines)


def by_batch(results: Results, place: str) -> str:
    view = View(results, "batch")
    if not view:
        return ""
    rows = view.values("rows")
    found = {
        n: (view.row("tensor", rows=n), view.least(("data", "zero=1"), rows=n), view.pipeline(rows=n)) for n in rows
    }
    few, many = min(rows), max(rows)
    tensors = [
        f"{times(t['s'] / d['s'])} times at {n} rows" for n in (few, many) if (t := found[n][0]) and (d := found[n][1])
    ]
    pipes = [
        f"{times(p['s'] / d['s'])} times at {n} rows" for n in (few, many) if (p := found[n][2]) and (d := found[n][1])
    ]
    return (
        f"## By batch\n\nGPT-2 medium on four A100-40GB with NVLink. Against data parallelism a step of `tensor` takes "
        f"{' and '.join(tensors)}, one of the best pipeline {' and '.join(pipes)}: all flavours gain from a larger "
        "batch, pipelines most, since more micro-batches fill them. Speed in percent of the fastest plan:\n\n"
        + _shares(view, "rows", rows, ["rows of 1,024 tokens", *map(str, rows)])
        + f"\n\n![by batch]({place}/batch.svg)"
    )


def by_links(results: Results, place: str) -> str:
    texts = []
    for part, said in (
        ("link", "**Four cards of one host**, by the bandwidth from each of them to the others"),
        ("node2", "**Two hosts of two cards**, each with NVLink inside, by the bandwidth of a host's adapter"),
        ("node1", "**Four hosts of one card**, by the same"),
    ):
        view = View(results, part)
        if not view:
            continue
        clusters = view.values("cluster")
        head = ["GB/s", *(f"{bandwidth(view.row(BEST, cluster=c) or view.rows[0]):g}" for c in clusters)]
        texts.append(f"{said}:\n\n{_shares(view, 'cluster', clusters, head)}\n\n![{part}]({place}/{part}.svg)")
    if not texts:
        return ""
    first = (
        "## By links and cards a host\n\nGPT-2 medium, 32 x 1,024 tokens, four A100-40GB. Speed in percent of the "
        "fastest plan."
    )
    return "\n\n".join([first, *texts, _why_links(results)])


def _why_links(results: Results) -> str:
    view = View(results, "link")
    data = [row for row in view.rows if row["flavour"] == "data" and fits(row)]
    if not data:
        return ""
    slow, quick = min(data, key=bandwidth), max(data, key=bandwidth)
    sent = view.pipeline(cluster=slow["cluster"])
    more = f", of the best pipeline {part_of(sent, 'pipeline'):.0f} %" if sent else ""
    return (
        f"Why: data parallelism sends each gradient once a step, whatever the batch; at {bandwidth(slow):g} GB/s "
        "that is "
        f"{part_of(slow, 'data'):.0f} % of its step{more}, at {bandwidth(quick):g} GB/s {part_of(quick, 'data'):.0f} "
        "%. "
        "Tensor parallelism and rings send activations in every layer, several times each: they lose most by slow "
        "links. "
        "A pipeline sends the least of all, one layer's output for each stage, and pays with idle stages instead."
    )


# -- the two findings ----------------------------------------------------------------
def _crossing(results: Results, ratio: float, part: str = "link") -> float | None:
    """GB/s up to which a pipeline is so many times as fast as data parallelism; None where it never is."""
    view, found = View(results, part), []
    for cluster in view.values("cluster"):
        data, pipe = view.row("data", cluster=cluster), view.pipeline(cluster=cluster)
        if data and pipe and data["s"] >= ratio * pipe["s"]:
            found.append(bandwidth(data))
    return max(found, default=None)


def _tensor_ratios(results: Results) -> list[tuple[str, float]]:
    """By model and links, the step of tensor parallelism beside that of data parallelism."""
    found = []
    for card, links in CARDS:
        view = View(results, "size", cluster=card)
        for model in view.values("model"):
            tensor, data = view.row("tensor", model=model), view.row("data", model=model)
            if tensor and data:
                found.append((f"{NAMES.get(model, model)}, {links}", tensor["s"] / data["s"]))
    return found


def findings(results: Results, place: str) -> str:
    if not results.of("size"):
        return ""
    return "\n\n".join(
        [
            "## The reports' two findings",
            _pipelines(results),
            _tensors(results),
            f"![what a step is spent on]({place}/parts.svg)",
        ]
    )


def _pipelines(results: Results) -> str:
    lines = []
    for card, links in CARDS:
        view = View(results, "size", cluster=card)
        for model in view.values("model"):
            data, pipe = view.row("data", model=model), view.pipeline(model=model)
            if data and pipe:
                lines.append([f"{NAMES.get(model, model)}, {links}", ms(data), ms(pipe), words(pipe),
                              f"{data['s'] / pipe['s']:.2f}", f"{part_of(data, 'data'):.0f} %",
                              f"{part_of(pipe, 'bubble'):.0f} %", f"{part_of(pipe, 'pipeline'):.0f} %"])  # fmt: skip
    for part, said in (("link", "one host"), ("node1", "four hosts")):
        view = View(results, part)
        for cluster in view.values("cluster"):
            data, pipe = view.row("data", cluster=cluster), view.pipeline(cluster=cluster)
            if data and pipe:
                lines.append([f"GPT-2 medium, {said}, {bandwidth(data):g} GB/s", ms(data), ms(pipe), words(pipe),
                              f"{data['s'] / pipe['s']:.2f}", f"{part_of(data, 'data'):.0f} %",
                              f"{part_of(pipe, 'bubble'):.0f} %", f"{part_of(pipe, 'pipeline'):.0f} %"])  # fmt: skip
    ratios = [float(line[4]) for line in lines]
    head = ["where", "data, ms", "pipeline, ms", "which", "times as fast", "data: gradients", "pipeline: idle", "sends"]
    bounds = [
        (said, _crossing(results, FAR * 0.9, part))
        for part, said in (("link", "in one host"), ("node1", "between hosts"))
    ]
    held = ", ".join(f"{said} up to {rate:g} GB/s" for said, rate in bounds if rate is not None)
    verdict = f"It holds for GPT-2 medium {held}" if held else "It holds in none of these settings"
    return (
        f"**Pipelines nearly three times as fast as vanilla data parallelism.** {verdict}: there the gradients of data "
        "parallelism take most of its step, and a pipeline has none to send. With NVLink or PCIe it does not hold: "
        f"gradients hide beside the backward pass, and stages wait. Over all settings here the ratio goes from "
        f"{min(ratios):.2f} to {max(ratios):.2f}. A data parallelism that keeps its gradients in float32, sums them "
        "behind the backward pass, or runs without peer-to-peer copies would move this border "
        f"upwards.\n\n{table(head, lines)}"
    )


def _tensors(results: Results) -> str:
    lines: list[list[str]] = []
    slower: dict[str, list[str]] = {}
    for card, links in CARDS:
        view, alone = View(results, "size", cluster=card), View(results, "one")
        for model in view.values("model"):
            data, tensor, one = (
                view.row("data", model=model),
                view.row("tensor", model=model),
                alone.row("data", model=model),
            )
            if not (data and tensor):
                continue
            name = f"{NAMES.get(model, model)}, {links}"
            gain = NOTHING if one is None else f"{one['s'] / tensor['s']:.2f}"
            if one is not None and tensor["s"] > one["s"]:
                slower.setdefault(links, []).append(NAMES.get(model, model))
            best = view.least(("tensor", "sequence=gather", "tensor=2d", *SEQUENCES), model=model)
            lines.append([name, ms(data), ms(tensor), f"{tensor['s'] / data['s']:.2f}", gain,
                          f"{part_of(tensor, 'tensor'):.0f} %", words(best)])  # fmt: skip
    head = [
        "where",
        "data, ms",
        "tensor=4, ms",
        "times as long",
        "speed-up over one card",
        "its transfers",
        "best split of layers",
    ]
    where = "; ".join(f"{_listed(models)} on {links}" for links, models in slower.items())
    said = f"slower even than one card alone in some ({where})" if slower else "still faster than one card alone"
    worse = sum(float(line[3]) > 1 for line in lines)
    return (
        f"**Tensor parallelism is counter-productive where the model fits one card.** It holds in {worse} of "
        f"{len(lines)} "
        f"settings: four cards are faster as copies. And it is {said}. Why: each layer waits for four all-reduces of "
        "all "
        "activations, a quarter of each matmul is too thin for the chip, and what is not split is done four times. "
        "It does "
        "not hold where a copy does not fit (GPT-3 below), nor where the batch has fewer rows than there are cards, "
        "so that "
        f"copies would have nothing to do.\n\n{table(head, lines)}{_grids(results)}"
    )


def _grids(results: Results) -> str:
    """Why a grid is the best split here, and 1D on the page that compiles."""
    view = View(results, "size", cluster=CARDS[0][0], model="gpt2-medium")
    line, grid = view.row("tensor"), view.row("tensor=2d")
    if line is None or grid is None or grid["s"] > line["s"]:
        return ""
    sent = {row["flavour"]: 1e3 * row["parts"]["tensor"] for row in (line, grid)}
    between = {row["flavour"]: 1e3 * row["parts"]["elementwise"] for row in (line, grid)}
    return (
        "\n\nOn NVLink `tensor=2d:4` is the best split although it sends more: for GPT-2 medium its transfers take "
        f"{sent['tensor=2d']:.0f} ms, those of `tensor=4` {sent['tensor']:.0f}. But what stands between the matmuls "
        f"takes {between['tensor=2d']:.0f} ms, and {between['tensor']:.0f} under `tensor=4`, which does not split "
        "norms and residual sums. [Choosing a plan](choosing.md#in-short) says `tensor=N` up to 8 devices of a host: "
        "it goes by what is sent, for layers eight times as wide on H100, and its lower bounds count no time for what "
        "stands between matmuls."
    )


def _listed(names: list[str]) -> str:
    """`a, b and c`."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
