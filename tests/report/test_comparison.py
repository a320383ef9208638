from cjax.report import Candidate, Comparison, MemoryUse, Report, StepTime, Transfer

GIB = 2**30


def candidate(plan: str, needs: int, seconds: float | None = None, moves: int = 0, limit: int | None = 80) -> Candidate:
    return Candidate(
        plan,
        Report(
            plan,
            "8 x H100",
            MemoryUse(params=needs * GIB, limit=None if limit is None else limit * GIB),
            transfers=[Transfer("all-reduce", "data", moves * GIB, 1, 0)] if moves else (),
            time=None if seconds is None else StepTime(seconds),
        ),
    )


def test_rows() -> None:
    refused = Candidate("tensor=3", reason="heads (8): tensor=3 does not divide 8\n    write tensor=2\n    or tensor=4")
    table = Comparison([candidate("zero=1", 40, 0.2, moves=3), candidate("data=8", 90, 0.1), refused])
    lines = [" ".join(line.split()) for line in str(table).splitlines()]
    assert "zero=1 * yes 40.0 40.0 0 0 3.0 0 200 compute" in lines
    assert "data=8 NO 90.0 90.0 0 0 0 0 100 compute" in lines
    assert lines[-3:] == ["tensor=3 heads (8): tensor=3 does not divide 8", "write tensor=2", "or tensor=4"]
    assert all(len(line) <= 100 for line in str(table).splitlines())


def test_long_plans_and_reasons_are_whole() -> None:
    plan = "data=8 tensor=4 zero=3/8 microbatches=16 precision=bfloat16 remat=block"
    reason = " ".join(f"reason{n}" for n in range(40))
    text = str(Comparison([candidate(plan, 40, 0.2), Candidate(plan, reason=reason), candidate("data=32", 9)]))
    assert all(text.count(word) == 2 for word in plan.split())
    assert [word for word in text.split() if word.startswith("reason")] == reason.split()
    assert all(len(line) <= 100 for line in text.splitlines())


def test_best() -> None:
    slow, fast, too_big = candidate("a", 40, 0.2), candidate("b", 50, 0.1), candidate("c", 90, 0.01)
    assert Comparison([slow, fast, too_big]).best is fast
    assert Comparison([too_big, Candidate("d", reason="no")]).best is None
    chatty, quiet = candidate("e", 1, moves=5, limit=None), candidate("f", 1, moves=2, limit=None)
    assert Comparison([chatty, quiet]).best is quiet
    assert "*" not in str(Comparison([slow]))  # alone, it is no choice


def test_html() -> None:
    html = Comparison([candidate("zero=1", 40, 0.2), Candidate("tensor=<3>", reason="a\nb & c")])._repr_html_()
    assert "tensor=&lt;3&gt;" in html and "<td colspan='9'" in html and "a\nb &amp; c" in html


def test_what_is_predicted_stands_beside_the_bound_and_decides() -> None:
    slow, fast = candidate("zero=3", 40, 0.1), candidate("zero=1", 50, 0.2)
    for each, parts in ((slow, {"matmul": 0.5}), (fast, {"matmul": 0.3})):
        assert each.report is not None and each.report.time is not None
        object.__setattr__(each.report.time, "parts", parts)
    comparison = Comparison([slow, fast])
    assert comparison.best is fast
    lines = [" ".join(line.split()) for line in str(comparison).splitlines()]
    assert "zero=3 yes 40.0 40.0 0 0 0 0 500 100 compute" in lines
    assert all(len(line) <= 100 for line in str(comparison).splitlines())
