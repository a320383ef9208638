from dataclasses import replace

import pytest

from cjax.report import FlopCount, MemoryUse, ParamRow, Report, StepTime, Transfer

GIB = 2**30


def row(name: str, shape: tuple[int, ...], dims: tuple[str, ...], *axes: tuple[str, ...], parts: int = 1) -> ParamRow:
    size = 4
    for length in shape:
        size *= length
    return ParamRow(name, shape, "float32", dims, axes, size, size // parts)


PARAMS = [
    row("wte/embedding", (50260, 768), ("vocab", "embed"), ("tensor",), (), parts=4),
    *(row(f"h/{i}/mlp/kernel", (768, 3072), ("embed", "ffn"), (), ("tensor",), parts=4) for i in range(12)),
    *(row(f"h/{i}/norm_{j}/scale", (768,), ("embed",), ()) for i in range(12) for j in (1, 2)),
]
# The example of the design, to the byte.
REPORT = Report(
    plan="data=2 tensor=4 zero=1",
    devices="8 x H100",
    memory=MemoryUse(
        params=int(2.9 * GIB), grads=int(2.9 * GIB), optimizer=int(5.8 * GIB), activations=int(27.2 * GIB),
        compiler=int(2.4 * GIB), limit=int(79.1 * GIB),
    ),
    params=PARAMS,
    transfers=[
        Transfer("reduce-scatter", "data", int(1.2 * GIB), 48, int(0.3 * GIB)),
        Transfer("all-reduce", "tensor", int(4.5 * GIB), 192, int(0.1 * GIB)),
        Transfer("all-gather", "tensor", int(0.4 * GIB), 4, 0),
    ],
    flops=FlopCount(1.2e15, 1.1e15, 0, 1.5e14),
    time=StepTime(0.198, 0.014, 0.0),
    shares={"optimizer": 1 / 8, "activations": 1 / 8},
    watch=["vocab 50257 padded to 50260", "1 unknown primitive: foo"],
)  # fmt: skip


def test_the_five_lines() -> None:
    assert REPORT.summary.splitlines() == [
        "fits    41.2 of 79.1 GiB a device: params 2.9, grads 2.9, optimizer 5.8, activations 27.2,",
        "        compiler 2.4",
        "split   params 1/4, optimizer 1/8, activations 1/8; whole on every device: 0.028 % (scale)",
        "moves   6.1 GiB a device and step: tensor 4.9, data 1.2; 0.4 not hidden",
        "step    >= 212 ms: compute 198, transfer 14, bubble 0: compute-bound",
        "watch   vocab 50257 padded to 50260; 1 unknown primitive: foo",
    ]


def test_full_text() -> None:
    text = str(REPORT)
    assert text.startswith("plan    data=2 tensor=4 zero=1\non      8 x H100\nfits ")
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "wte/embedding [50260, 768] float32 [vocab, embed] [tensor, -] 36.8" in lines
    assert "h/*/mlp/kernel x12 [768, 3072] float32 [embed, ffn] [-, tensor] 27.0" in lines
    assert "h/*/norm_*/scale x24 [768] float32 [embed] whole 0.1" in lines
    assert "all-reduce tensor 192 4.5 0.1" in lines
    assert [line.split()[0] for line in lines if line.split()[:2][-1:] in (["tensor"], ["data"])] == [
        "all-reduce", "reduce-scatter", "all-gather"
    ]  # fmt: skip
    assert "model, forward and backward 1.2 PFLOP" in lines and "on each device 150.0 TFLOP" in lines
    assert "recomputed" not in text
    assert max(map(len, text.splitlines())) <= 100


def test_rows_that_differ_stay_apart() -> None:
    other = replace(PARAMS[1], placement=(("tensor",), ()))
    lines = str(replace(REPORT, params=[*PARAMS[1:], other])).splitlines()
    assert sum("mlp/kernel" in line for line in lines) == 2
    assert any("h/0/mlp/kernel " in line for line in lines)  # alone, it keeps its number


def test_fields() -> None:
    assert REPORT.bytes_moved == sum(transfer.bytes for transfer in REPORT.transfers)
    assert list(REPORT.bytes_moved_by_axis) == ["tensor", "data"]
    assert REPORT.bytes_exposed == int(0.3 * GIB) + int(0.1 * GIB)
    assert REPORT.time is not None and REPORT.time.bound == "compute"
    assert REPORT.memory.fits and REPORT.memory.total == sum(REPORT.memory.parts.values())


@pytest.mark.parametrize(
    "changed, line",
    [
        ({"memory": MemoryUse(params=100 * GIB, limit=80 * GIB)}, "OVER    100.0 of 80.0 GiB a device: params 100.0"),
        ({"memory": MemoryUse(params=3 * 2**20)}, "needs   3.0 MiB a device: params 3.0"),
        ({"memory": MemoryUse(params=3 * 2**20, limit=80 * GIB)}, "fits    3.0 MiB of 80.0 GiB a device: params 3.0"),
        ({"memory": MemoryUse()}, "needs   0 B a device"),
        ({"params": PARAMS[:1]}, "split   params 1/4, optimizer 1/8, activations 1/8"),
        ({"params": PARAMS[-2:], "shares": {}}, "split   params whole"),
        ({"params": (), "shares": {}}, "split   nothing"),
        ({"transfers": ()}, "moves   nothing between devices"),
        ({"transfers": [Transfer("all-reduce", "data", GIB, 1, 0)]},
         "moves   1.0 GiB a device and step: data 1.0; all hidden"),
        ({"transfers": [Transfer("all-reduce", "data", GIB, 1), Transfer("all-gather", "data", GIB, 1, 5)]},
         "moves   2.0 GiB a device and step: data 2.0; overlap unknown"),
        (
            {"time": StepTime(0.2, 0.081, 0, {"matmul": 0.5, "data": 0.12}, (0.54, 0.72), "fitted on runs")},
            "step    about 620 ms (540-720): matmul 500, data 120; >= 281 ms: compute 200, transfer 81, bubble 0:",
        ),
        ({"time": StepTime(0.2, 0.3)}, "step    >= 500 ms: compute 200, transfer 300, bubble 0: transfer-bound"),
        ({"time": None}, "step    time unknown: nobody told how fast this hardware is"),
        ({"watch": ()}, "watch   nothing"),
    ],
)  # fmt: skip
def test_lines(changed: dict, line: str) -> None:
    assert line in replace(REPORT, **changed).summary.splitlines()


def test_exactly_full_still_fits() -> None:
    assert MemoryUse(params=8, limit=8).fits and not MemoryUse(params=9, limit=8).fits


def test_html_has_everything_escaped() -> None:
    html = replace(REPORT, watch=["<script>alert(1)</script>"])._repr_html_()
    assert "<script>" not in html and "&lt;script&gt;" in html
    for said in ("41.2 of 79.1 GiB", "h/*/mlp/kernel x12", "all-reduce", "1.2 PFLOP", "8 x H100"):
        assert said in html
