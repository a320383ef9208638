"""Tables of `pipeline.py`, made of the rows on disk, as Markdown."""

from pathlib import Path

from shared.markdown import table
from shared.results import Results, Row

from .schedules import text_of

GIB, MIB = 2**30, 2**20


def write_tables(results: Results, folder: Path) -> str:
    """All tables as one text, also kept as `tables.md`."""
    makers = (_schedules, _compiled, _timed, _processes)
    text = "\n\n".join(part for maker in makers if (part := maker(results)))
    (folder / "tables.md").write_text(text + "\n")
    return text


def by_stages(rows: list[Row]) -> dict[int, list[Row]]:
    found: dict[int, list[Row]] = {}
    for row in rows:
        found.setdefault(row["stages"], []).append(row)
    return found


def _schedules(results: Results) -> str:
    head = ["schedule", "micro-batches", "ticks", "bubble", "not in lockstep", "activations held", "temporaries MiB"]
    texts = []
    for num_stages, rows in by_stages(results.of("s")).items():
        lines = [
            [
                text_of(row["schedule"], row["chunks"], num_stages),
                str(row["microbatches"]),
                str(row["ticks"]),
                f"{row['bubble']:.1%}",
                f"{row['bubble_alone']:.1%}",
                f"{row['held']:g}",
                f"{row['temporary'] / MIB:.1f}",
            ]
            for row in rows
        ]
        first = rows[0]
        title = (
            f"**{num_stages} stages, F = B = W**; temporaries of a step of {first['model']} with {first['num_layers']} "
            f"layers, {first['rows']} x {first['length']} tokens a micro-batch, float32, a device"
        )
        texts.append(f"{title}\n\n{table(head, lines)}")
    return "\n\n".join(texts)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"


def _compiled(results: Results) -> str:
    rows = results.of("c")
    if not rows:
        return ""
    head = ["plan", "layers", "peak GiB", "GiB received", "even share ms", "arithmetic ms", "exposed ms", "bubble",
            "as cut", "floor ms", "samples/s at most"]  # fmt: skip
    lines = []
    for row in rows:
        if "failed" in row:
            lines.append([row["plan"], f"failed: {row['failed']}", *[""] * (len(head) - 2)])
            continue
        lines.append(
            [
                row["plan"],
                " ".join(map(str, row.get("layers", ["all"]))),
                f"{row['peak'] / GIB:.2f}",
                f"{row['received'] / GIB:.3f}",
                _ms(row["even_s"]),
                _ms(row["compute_s"]),
                _ms(row["exposed_s"]),
                *(f"{row[name]:.1%}" if name in row else "-" for name in ("bubble", "bubble_as_cut")),
                _ms(row["floor_s"]),
                f"{row['batch'] / row['floor_s']:.0f}",
            ]
        )
    title = f"**GPT-2 small on 4 H100s, batch {rows[0]['batch']} x {rows[0]['length']} tokens, bfloat16, AdamW**"
    notes = (
        "Layers: of each stage. Even share: the model's matmuls over 4 devices at their peak rate. Arithmetic: what "
        "the compiled step multiplies, of a pipeline the most that any stage does of each op. Bubble: simulated in "
        "lockstep with F = B = W; as cut: with every stage's own layers, each slot as long as its matmuls, and head "
        "and loss in the last stage's B. Floor: of a pipeline the time simulated as cut, of another plan its "
        "arithmetic; and transfers that nothing hides."
    )
    return f"{title}\n\n{table(head, lines)}\n\n{notes}"


def _timed(results: Results) -> str:
    rows = results.of("t")
    if not rows:
        return ""
    base = next((row["ms"] for row in rows if row["plan"] == "data=4" and "ms" in row), None)
    lines = []
    for row in rows:
        if "failed" in row:
            lines.append([row["plan"], f"failed: {row['failed']}", "", ""])
            continue
        ratio = f"{row['ms'] / base:.3f}" if base else "-"
        lines.append([row["plan"], f"{row['ms']:.1f}", ratio, f"{row['loss']:.5f}"])
    size = rows[0]
    title = (
        f"**Step time on 4 virtual CPU devices**, which share the cores (idle stages cost nothing), medians of "
        f"{size['rounds']} interleaved steps: {size['num_layers']} layers, width {size['embed_dim']}, vocabulary "
        f"{size['vocab_size']}, batch {size['batch']} x {size['length']}, float32, Adam"
    )
    return f"{title}\n\n{table(['plan', 'ms', 'of data=4', 'loss at the end'], lines)}"


def _processes(results: Results) -> str:
    rows = {row["processes"]: row for row in results.of("p")}
    if not {1, 2} <= set(rows):
        return ""
    one, two = rows[1], rows[2]
    lines = [
        ["one process, a step", _ms(one["step_s"])],
        ["two processes, 1F1B, a step", _ms(two["step_s"])],
        ["the same, simulated", _ms(two["predicted_s"])],
        ["F of a stage and micro-batch", _ms(one["forward_s"] / 2)],
        ["B and W of a stage and micro-batch", _ms((one["microbatch_s"] - one["forward_s"]) / 2)],
        ["a transfer", _ms(two["transfer_s"])],
        ["optimizer and the like, in one process", _ms(one["rest_s"])],
    ]
    title = (
        f"**Two processes, a core each**: {one['num_layers']} layers, width {one['embed_dim']}, {one['microbatches']} "
        f"micro-batches of 1 x {one['length']} tokens, float32, Adam; medians of {one['steps']} steps, ms"
    )
    said = (
        f"{one['step_s'] / two['step_s']:.2f} times as fast as one process; measured over simulated: "
        f"{two['step_s'] / two['predicted_s']:.3f}; simulated bubble {two['bubble']:.1%}."
    )
    return f"{title}\n\n{table(['what', 'ms'], lines)}\n\n{said}"
