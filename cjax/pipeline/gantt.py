"""A schedule as text or as a picture: who runs what in which tick, or when."""

from html import escape

from cjax.pipeline.route import KINDS
from cjax.pipeline.simulate import Simulation, Span
from cjax.pipeline.table import Op, Schedule

FILL = {"F": ">", "B": "<", "W": "="}
# Mid-tones, which stand out on white and on black; dark numbers are read on each of them and on its paler shades.
COLORS = {"F": "#5b9bd5", "B": "#e88c4a", "W": "#6fbf73"}
WORDS = {"F": "forward", "B": "backward", "W": "weights"}
WIDTH, ROW, BAR, LEFT, TOP = 960, 26, 22, 62, 58  # of the picture, in pixels
STYLE = (
    "text{font:12px sans-serif;fill:#222}.n{font-size:10px;text-anchor:middle;fill:#111}"
    ".line{stroke:#888;fill:none}rect{stroke:#444;stroke-width:.5}"
    "@media(prefers-color-scheme:dark){.label{fill:#ddd}}"
)


def gantt(of: Schedule | Simulation, width: int = 120) -> str:
    """A chart for the terminal, in at most `width` columns.

    Of a schedule: a column for each tick, in which every stage has a line for each kind of op, with the micro-batch it
    works on; letters tell chunks apart. Of a simulation: a line for each stage and a bar as long as each op takes, with
    `>` for F, `<` for B, `=` for W and `.` for waiting.

    Args:
      of: a schedule, or what `simulate` made of one.
      width: columns of the terminal.

    >>> from cjax.pipeline.schedule import one_f_one_b
    >>> print(gantt(one_f_one_b(2, 3)))
    1f1b: 2 stages, 3 micro-batches, 5 ticks, up to 3 activations a stage
    tick      0 1 2 3 4
    stage 0 F 0 1 2 . .
            B . . 0 1 2
    stage 1 F . 0 1 2 .
            B . 0 1 2 .
    """
    if isinstance(of, Simulation):
        return _bars(of, width)
    return _columns(of, width)


def _title(schedule: Schedule) -> str:
    stages = f"{schedule.num_stages} stages" + (f" of {schedule.num_chunks} chunks" if schedule.num_chunks > 1 else "")
    counts = f"{stages}, {schedule.num_microbatches} micro-batches, {schedule.num_ticks} ticks"
    held = max(schedule.held()) / schedule.num_chunks
    return f"{schedule.name}: {counts}, up to {held:g} activations a stage"


def _columns(schedule: Schedule, width: int) -> str:
    kinds = KINDS if schedule.split else KINDS[:2]
    last = str(schedule.num_microbatches - 1)
    cell = max(len(last) + (schedule.num_chunks > 1), len(str(schedule.num_ticks - 1)))
    head = len(f"stage {schedule.num_stages - 1} F")
    shown = min(schedule.num_ticks, max(1, (width - head) // (cell + 1)))
    lines = ["tick".ljust(head) + "".join(f" {tick:>{cell}}" for tick in range(shown))]
    for stage in range(schedule.num_stages):
        for kind in kinds:
            label = f"stage {stage}" if kind == "F" else ""
            texts = [_text(schedule, kind, schedule.ticks[tick][stage]) for tick in range(shown)]
            lines.append(label.ljust(head - 1) + kind + "".join(f" {text:>{cell}}" for text in texts))
    hidden = schedule.num_ticks - shown
    more = [f"... and {hidden} more ticks"] if hidden else []
    return "\n".join([_title(schedule), *lines, *more])


def _text(schedule: Schedule, kind: str, ops: tuple[Op, ...]) -> str:
    for op in ops:
        if op.kind == kind:
            return str(op.microbatch) + (chr(ord("a") + op.chunk) if schedule.num_chunks > 1 else "")
    return "."


def _bars(simulation: Simulation, width: int) -> str:
    schedule = simulation.schedule
    head = len(f"stage {schedule.num_stages - 1} ")
    columns = max(1, width - head)
    scale = columns / simulation.makespan if simulation.makespan else 0.0
    rows = [["."] * columns for _ in range(schedule.num_stages)]
    for span in simulation.spans:
        start, end = round(span.start * scale), round(span.end * scale)
        rows[span.stage][start:end] = _bar(span, end - start)
    lines = [f"stage {stage}".ljust(head) + "".join(row) for stage, row in enumerate(rows)]
    times = f"{_title(schedule)}; time {simulation.makespan:g}, idle {simulation.bubble:.1%}"
    return "\n".join([times, *lines])


def _bar(span: Span, columns: int) -> str:
    label = str(span.op.microbatch)
    fill = FILL[span.op.kind]
    return label.ljust(columns, fill) if len(label) < columns else fill * columns


def gantt_svg(simulation: Simulation) -> str:
    """A picture as self-contained SVG: a row for each stage, a bar as long as each op takes, with its micro-batch.

    Later chunks of a stage are drawn paler. It has no background of its own, and is read on light and on dark ones.

    Args:
      simulation: what `simulate` found; or a real run, its measured spans in a `Simulation` of its schedule.

    >>> from cjax.pipeline.schedule import one_f_one_b
    >>> from cjax.pipeline.simulate import simulate
    >>> gantt_svg(simulate(one_f_one_b(2, 3))).count("<rect")
    12
    """
    schedule = simulation.schedule
    first = min((span.start for span in simulation.spans), default=0.0)
    scale = WIDTH / simulation.makespan if simulation.makespan else 0.0
    bottom = TOP + ROW * schedule.num_stages
    kinds = KINDS if schedule.split else KINDS[:2]
    drawn = [_label(8, 18, f"{_title(schedule)}; idle {simulation.bubble:.1%}")]
    for place, kind in enumerate(kinds):
        x = LEFT + 110 * place
        drawn.append(f'<path d="M{x} 31h14v14h-14z" fill="{COLORS[kind]}"/>')
        drawn.append(_label(x + 20, 42, f"{kind}: {WORDS[kind]}"))
    if schedule.num_chunks > 1:
        drawn.append(_label(LEFT + 110 * len(kinds), 42, "later chunks paler"))
    for stage in range(schedule.num_stages):
        y = TOP + ROW * stage
        drawn.append(_label(8, y + 15, f"stage {stage}"))
        drawn.append(f'<path class="line" d="M{LEFT} {y + BAR / 2:g}h{WIDTH}" stroke-dasharray="1 3"/>')
    drawn += [_rect(span, (span.start - first) * scale, scale, schedule.num_chunks) for span in simulation.spans]
    drawn.append(f'<path class="line" d="M{LEFT} {bottom + 2}h{WIDTH}"/>')
    drawn += [_label(LEFT, bottom + 18, "0"), _label(LEFT + WIDTH, bottom + 18, f"{simulation.makespan:g}", "end")]
    size = f'width="{LEFT + WIDTH + 12}" height="{bottom + 26}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>{STYLE}</style>'
    return "\n".join([head, *drawn, "</svg>\n"])


def _label(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text class="label" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>'


def _rect(span: Span, left: float, scale: float, num_chunks: int) -> str:
    """A bar, what it is for the pointer over it, and its micro-batch where there is room for the number."""
    x, y, width = LEFT + left, TOP + ROW * span.stage, (span.end - span.start) * scale
    fill = _paler(COLORS[span.op.kind], 0.6 * span.op.chunk / num_chunks)
    what = f"{span.op} on stage {span.stage}, {span.start:g} to {span.end:g}"
    bar = f'<rect x="{x:.3f}" y="{y}" width="{width:.3f}" height="{BAR}" fill="{fill}"><title>{what}</title></rect>'
    number = str(span.op.microbatch)
    if width < 6 * len(number) + 2:
        return bar
    return f'{bar}<text class="n" x="{x + width / 2:.1f}" y="{y + 15}">{number}</text>'


def _paler(color: str, share: float) -> str:
    """The color on its way to white."""
    parts = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in parts)
