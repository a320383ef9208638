from cjax.report import BlockRow, DimRow, TraceSummary

SUMMARY = TraceSummary(
    "GPT",
    [
        DimRow("vocab", (50257,), ("wte/embedding:0",)),
        DimRow("heads", (12, 768), tuple(f"h/{i}/attention/query/kernel:1" for i in range(12))),
    ],
    [BlockRow(12, "Block", 150, 0.968), BlockRow(6, "Decoder", 90, 0.2)],
    {"foo": 3, "bar": 1},
)


def test_text() -> None:
    text = str(SUMMARY)
    assert text.splitlines()[:4] == [
        "trace   of GPT",
        "blocks  12 x Block (150 equations each, 97 % of the trace); 6 x Decoder (90 equations each, 20 % of",
        "        the trace)",
        "unknown foo (3 times), bar: their dims count as unrelated",
    ]
    flat = " ".join(text.split())
    assert "vocab 50,257 wte/embedding:0" in flat and "heads 12, 768 h/0/attention/query/kernel:1" in flat
    assert "and 8 more" in flat and all(len(line) <= 100 for line in text.splitlines())


def test_nothing_found() -> None:
    text = str(TraceSummary("Net", []))
    assert "blocks  none: no part repeats" in text and "unknown no primitive" in text


def test_html() -> None:
    html = TraceSummary("<Net>", SUMMARY.dims, SUMMARY.blocks, SUMMARY.unknown)._repr_html_()
    assert "&lt;Net&gt;" in html and "12 x Block" in html and "50,257" in html
