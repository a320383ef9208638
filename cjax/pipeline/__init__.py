"""When the stages of a pipeline run: schedules as tables, their laws, their times, their charts."""

from cjax.pipeline.gantt import gantt, gantt_svg
from cjax.pipeline.schedule import (
    build,
    from_orders,
    gpipe,
    interleaved,
    one_f_one_b,
    split_backward,
    zero_bubble,
    zero_bubble_v,
)
from cjax.pipeline.simulate import Simulation, Times, simulate
from cjax.pipeline.table import Op, Schedule, check

__all__ = [
    "Op",
    "Schedule",
    "Simulation",
    "Times",
    "build",
    "check",
    "from_orders",
    "gantt",
    "gantt_svg",
    "gpipe",
    "interleaved",
    "one_f_one_b",
    "simulate",
    "split_backward",
    "zero_bubble",
    "zero_bubble_v",
]
