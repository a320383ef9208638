"""A schedule as text: who runs what in which tick, or when."""

from cjax.pipeline.route import KINDS
from cjax.pipeline.simulate import Simulation, Span
from cjax.pipeline.table import Op, Schedule

FILL = {"F": ">", "B": "<", "W": "="}


def gantt(of: Schedule | Simulation, width: int = 120) -> str:
    """A chart for the terminal, in at most `width` columns.

    Of a schedule: a column for each tick, in which every stage has a line for each kind of op, with the micro-batch it
    works on; letters tell chunks apart. Of a simulation: a line for each stage and a bar as long as each op takes, with
    `>` for F, `<` for B, `=` for W and `.` for waiting.

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
