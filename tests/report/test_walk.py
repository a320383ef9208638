"""What a report says of a step that walks over layers."""

from dataclasses import replace

from cjax.report import ClassUse, MemoryUse, PhaseUse, Report, WalkUse

GIB = 2**30
WALK = WalkUse(
    [
        ClassUse("params", {"device": 12, "host": 20, "disk": 0}, 6 * GIB, 10 * GIB, 0, 30 * GIB, 10 * GIB),
        ClassUse("optimizer", {"device": 0, "host": 0, "disk": 32}, 0, 0, 64 * GIB, 32 * GIB, 32 * GIB, 33 * GIB,
                 33 * GIB),
    ],
    peak=15 * GIB,
    fullest="the backward pass",
    budget=16 * GIB,
    host_limit=200 * GIB,
    phases={"forward": PhaseUse(0.4, 0.2, 0), "backward": PhaseUse(1.2, 0.4, 0), "update": PhaseUse(0, 0.7, 5.5)},
    bound="disk",
    tokens=16384,
    hidden_from=8200,
    rates="link 55 GB/s each way",
)  # fmt: skip


def text(lines: list[tuple[str, str]]) -> dict[str, str]:
    return dict(lines)


def test_lines() -> None:
    assert text(WALK.lines()) == {
        "holds": "15.0 of 16.0 GiB a device, at most in the backward pass; 10.0 of 200.0 GiB of host memory a process; "
        "64.0 GiB of disk",
        "homes": "params 12 on the device, 20 in host memory; optimizer on disk",
        "link": "62.0 GiB to a device and 42.0 back, each step",
        "disk": "33.0 GiB read and 33.0 written a process and step: what is written wears it",
        "walk": ">= 7,100 ms with 16,384 tokens: forward 400, backward 1,200, update 5,500; 5,500 of it not hidden; "
        "disk-bound; from 8,200 tokens a step the passes forward and back hide what they move; link 55 GB/s each way",
    }


def test_what_is_not_known_or_not_there_is_said() -> None:
    unknown = text(replace(WALK, phases={}).lines())
    assert unknown["walk"].startswith("time unknown")
    assert "no number of tokens" in text(replace(WALK, hidden_from=None).lines())["walk"]
    assert text(replace(WALK, is_bound=False).lines())["walk"].startswith("about 7,100 ms")
    still = text(replace(WALK, classes=[ClassUse("params", {"device": 32}, GIB)]).lines())
    assert still["link"] == "nothing leaves the devices" and "disk" not in still and "nothing to hide" in still["walk"]


def test_the_report_has_it_between_what_moves_and_the_step() -> None:
    report = Report("budget=16GiB", "1 x H100", MemoryUse(params=GIB, limit=2 * GIB), walk=WALK)
    labels = [line.split()[0] for line in report.summary.splitlines() if not line.startswith(" ")]
    assert labels == ["fits", "split", "moves", "holds", "homes", "link", "disk", "walk", "step", "watch"]
    assert max(map(len, str(report).splitlines())) <= 100
    lines = [" ".join(line.split()) for line in str(report).splitlines()]
    assert "params 6.0 10.0 0 30.0 10.0 0 0" in lines and "optimizer 0 0 64.0 32.0 32.0 33.0 33.0" in lines
    assert "optimizer on disk" in report._repr_html_()
