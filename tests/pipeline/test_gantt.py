"""Charts for the terminal, and as pictures."""

from xml.etree import ElementTree

import pytest

from cjax.pipeline import (
    Schedule,
    Simulation,
    Times,
    gantt,
    gantt_svg,
    interleaved,
    one_f_one_b,
    simulate,
    zero_bubble,
    zero_bubble_v,
)


def test_columns_of_chunks() -> None:
    assert gantt(interleaved(2, 2, 2)).splitlines()[1:] == [
        "tick       0  1  2  3  4  5  6  7",
        "stage 0 F 0a 1a 0b 1b  .  .  .  .",
        "        B  .  .  .  . 0b 1b 0a 1a",
        "stage 1 F  . 0a 1a 0b 1b  .  .  .",
        "        B  .  .  . 0b 1b 0a 1a  .",
    ]


def test_a_split_backward_has_a_third_line() -> None:
    lines = gantt(zero_bubble(2, 3)).splitlines()
    assert [line[8] for line in lines[2:]] == list("FBWFBW")


def test_wide_tables_are_cut() -> None:
    text = gantt(one_f_one_b(4, 100), width=80)
    assert max(map(len, text.splitlines())) <= 80
    shown = len(text.splitlines()[1].split()) - 1
    assert text.endswith(f"... and {106 - shown} more ticks")


def test_bars_are_as_long_as_their_ops() -> None:
    found = simulate(one_f_one_b(2, 3), Times(1, 1, 1))
    assert gantt(found, width=8 + 12 * 3).splitlines() == [
        "1f1b: 2 stages, 3 micro-batches, 5 ticks, up to 3 activations a stage; time 12, idle 25.0%",
        "stage 0 0>>1>>......2>>0<<<<<1<<<<<...2<<<<<",
        "stage 1 ...0>>0<<<<<1>>1<<<<<2>>2<<<<<......",
    ]
    assert len(gantt(found, width=30).splitlines()[1]) == 30


@pytest.mark.parametrize("schedule", [one_f_one_b(4, 8), interleaved(2, 4, 2), zero_bubble(3, 5), zero_bubble_v(2, 4)])
@pytest.mark.parametrize("lockstep", [True, False])
def test_pictures_have_a_bar_for_each_op(schedule: Schedule, lockstep: bool) -> None:
    found = simulate(schedule, Times(1, (2.5,) * schedule.num_stages, 0.75), lockstep)
    picture = ElementTree.fromstring(gantt_svg(found))
    bars = picture.findall("{*}rect")
    assert len(bars) == len(found.spans) == len(list(schedule.placed()))
    widths = [float(bar.attrib["width"]) for bar in bars]
    scale = sum(widths) / sum(span.end - span.start for span in found.spans)
    assert widths == pytest.approx([(span.end - span.start) * scale for span in found.spans], abs=0.05)
    lefts = [float(bar.attrib["x"]) for bar in bars]
    assert lefts == pytest.approx([min(lefts) + span.start * scale for span in found.spans], abs=0.05)
    by_stage = {bar.attrib["y"]: span.stage for bar, span in zip(bars, found.spans, strict=True)}
    assert sorted(by_stage.values()) == list(range(schedule.num_stages)), "one row a stage"
    colors = {(span.op.kind, span.op.chunk): bar.attrib["fill"] for bar, span in zip(bars, found.spans, strict=True)}
    assert len(set(colors.values())) == len(colors) == (3 if schedule.split else 2) * schedule.num_chunks
    text = "".join(picture.itertext())
    assert f"{schedule.name}: " in text and f"idle {found.bubble:.1%}" in text and "activations a stage" in text


def test_a_measured_run_is_drawn_from_its_own_start() -> None:
    """Spans of a clock: seconds since some other moment, micro-batches on short bars without their number."""
    found = simulate(one_f_one_b(2, 3), Times(1, 1, 1))
    later = tuple(span._replace(start=1e3 + span.start / 8, end=1e3 + span.end / 8) for span in found.spans)
    measured = Simulation(found.schedule, later, found.makespan / 8)

    def drawn(simulation: Simulation, what: str) -> list[float]:
        return [float(bar.attrib[what]) for bar in ElementTree.fromstring(gantt_svg(simulation)).findall("{*}rect")]

    assert drawn(measured, "x") == pytest.approx(drawn(found, "x"))
    assert drawn(measured, "width") == pytest.approx(drawn(found, "width"))
    assert gantt_svg(simulate(one_f_one_b(2, 400))).count('class="n"') < 4 * 400
