"""Charts for the terminal."""

from cjax.pipeline import Times, gantt, interleaved, one_f_one_b, simulate, zero_bubble


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
