"""Every schedule against its formula, against numbers taken from Colossal-AI, and by the laws it should obey."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cjax.optim import schedules
from cjax.optim.schedules import schedule

PEAK = 0.1
LAST = 25  # beyond the longest total_steps below: what comes after the end is tested too


class Case(NamedTuple):
    name: str
    arguments: dict[str, Any]
    rate: Callable[[int], float]  # the same by hand, in float64


def ramp(warmup: int, after: Callable[[int], float]) -> Callable[[int], float]:
    return lambda t: PEAK * (t + 1) / warmup if t < warmup else after(t - warmup)


def cosine(steps: int, end: float = 0.0) -> Callable[[int], float]:
    return lambda t: end + (PEAK - end) * (1 + math.cos(math.pi * min(t, steps) / steps)) / 2


def flat(steps: int, after: Callable[[int], float]) -> Callable[[int], float]:
    return lambda t: PEAK if t < steps else after(t - steps)


def power(steps: int, end: float, exponent: float) -> Callable[[int], float]:
    return lambda t: end + (PEAK - end) * (1 - min(t, steps) / steps) ** exponent


def triangle(t: int) -> float:
    return PEAK * (t + 1) / 5 if t < 4 else PEAK * max(0, 20 - t) / 16


def drops(*milestones: int, gamma: float) -> Callable[[int], float]:
    return lambda t: PEAK * gamma ** sum(t >= step for step in milestones)


def cycle(top: float, last: int, shape: Callable[[float], float], start: float, end: float) -> Callable[[int], float]:
    def rate(t: int) -> float:
        if t < top:
            return start + (PEAK - start) * shape(t / top)
        return PEAK + (end - PEAK) * shape((min(t, last) - top) / (last - top))

    return rate


def ease(share: float) -> float:
    return (1 - math.cos(math.pi * share)) / 2


def halves(step: int) -> float:
    return 1.0 if step < 5 else 0.5  # a branch, which a traced step could not take


CASES = {
    "cosine": Case("cosine_annealing_lr", dict(total_steps=20, eta_min=0.01), cosine(20, 0.01)),
    "cosine of one step": Case("cosine_annealing_lr", dict(total_steps=1), cosine(1)),
    "cosine, warm-up": Case("cosine_annealing_warmup_lr", dict(total_steps=20, warmup_steps=4), ramp(4, cosine(16))),
    "cosine, warm-up of one": Case(
        "cosine_annealing_warmup_lr", dict(total_steps=20, warmup_steps=1, eta_min=0.02), ramp(1, cosine(19, 0.02))
    ),
    "cosine, warm-up but one": Case(
        "cosine_annealing_warmup_lr", dict(total_steps=20, warmup_steps=19), ramp(19, cosine(1))
    ),
    "flat": Case("flat_annealing_lr", dict(total_steps=20), flat(14, cosine(6))),
    "never flat": Case("flat_annealing_lr", dict(total_steps=20, pct_start=0.0), cosine(20)),
    "always flat": Case("flat_annealing_lr", dict(total_steps=20, pct_start=1.0), lambda t: PEAK),
    "flat, warm-up": Case(
        "flat_annealing_warmup_lr",
        dict(total_steps=20, warmup_steps=3, pct_start=0.4, eta_min=0.02),
        ramp(3, flat(6, cosine(11, 0.02))),
    ),
    "linear": Case("linear_warmup_lr", dict(total_steps=20), lambda t: PEAK * max(0, 20 - t) / 20),
    "linear, warm-up": Case("linear_warmup_lr", dict(total_steps=20, warmup_steps=4), triangle),
    "drops": Case("multi_step_lr", dict(total_steps=20, milestones=[0, 7, 11], gamma=0.5), drops(0, 7, 11, gamma=0.5)),
    "drops, one twice": Case("multi_step_lr", dict(total_steps=20, milestones=(7, 7)), drops(7, 7, gamma=0.1)),
    "drops, warm-up": Case(  # the milestone at 2 falls into the warm-up, that at 4 onto its end
        "multi_step_warmup_lr",
        dict(total_steps=20, warmup_steps=4, milestones=[2, 4, 9], gamma=0.3),
        ramp(4, drops(0, 5, gamma=0.3)),
    ),
    "one cycle": Case("one_cycle_lr", dict(total_steps=20), cycle(5, 19, ease, PEAK / 25, PEAK / 25e4)),
    "one cycle, straight, peak between steps": Case(
        "one_cycle_lr",
        dict(total_steps=17, pct_start=0.45, anneal_strategy="linear", div_factor=10, final_div_factor=100),
        cycle(0.45 * 17 - 1, 16, lambda share: share, PEAK / 10, PEAK / 1000),
    ),
    "one cycle, peak before the start": Case(
        "one_cycle_lr", dict(total_steps=20, pct_start=0.0), cycle(-1, 19, ease, PEAK / 25, PEAK / 25e4)
    ),
    "polynomial": Case("polynomial_lr", dict(total_steps=20), power(20, 1e-4, 1)),
    "polynomial, warm-up": Case(
        "polynomial_warmup_lr", dict(total_steps=20, warmup_steps=4, end_lr=0.01, power=3), ramp(4, power(16, 0.01, 3))
    ),
    "papers', steps": Case("warmup_polynomial", dict(total_steps=20, warmup=4, power=2), ramp(4, power(16, 0, 2))),
    "papers', share": Case("warmup_polynomial", dict(total_steps=20, warmup=0.2), ramp(4, power(16, 0, 1))),
    "lambda": Case("lambda_lr", dict(total_steps=20, lr_lambda=halves), lambda t: PEAK * halves(t)),
    "lambda, after the end": Case(
        "lambda_lr", dict(total_steps=20, lr_lambda=lambda t: 0.9**t), lambda t: PEAK * 0.9 ** min(t, 20)
    ),
    "multiplicative": Case(
        "multiplicative_lr", dict(total_steps=20, lr_lambda=halves), lambda t: PEAK * 0.5 ** max(0, min(t, 20) - 4)
    ),
    "stairs": Case("step_lr", dict(total_steps=20, step_size=3, gamma=0.5), lambda t: PEAK * 0.5 ** (t // 3)),
    "exponential": Case("exponential_lr", dict(total_steps=20, gamma=1.1), lambda t: PEAK * 1.1**t),
    "exponential by default": Case("exponential_lr", dict(total_steps=20), lambda t: PEAK),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@each_case
def test_formula_from_python_ints_and_compiled(case: Case) -> None:
    rate = schedule(case.name, learning_rate=PEAK, **case.arguments)
    wanted = [case.rate(step) for step in range(LAST)]
    np.testing.assert_allclose([float(rate(step)) for step in range(LAST)], wanted, rtol=2e-6, atol=1e-8)
    compiled = jax.jit(jax.vmap(rate))(jnp.arange(LAST, dtype=jnp.int32))  # vmap: each step is traced as a scalar
    np.testing.assert_allclose(compiled, wanted, rtol=2e-6, atol=1e-8)


def test_every_schedule_has_a_case() -> None:
    assert {case.name for case in CASES.values()} == set(schedules._SCHEDULES)


# Written down from Colossal-AI 0.5.0 with PyTorch 2.5.1, the last it allows, at learning rate 0.1: {step: rate}.
GOLDEN = [
    ("CosineAnnealingLR", dict(total_steps=7, eta_min=0.01), {0: 0.1, 3: 0.065013442, 7: 0.01}),
    (
        "CosineAnnealingWarmupLR",
        dict(total_steps=50, warmup_steps=5, eta_min=0.01),
        {0: 0.02, 4: 0.1, 5: 0.1, 20: 0.0775, 50: 0.01},
    ),
    ("FlatAnnealingLR", dict(total_steps=50), {0: 0.1, 35: 0.1, 37: 0.098746396, 45: 0.028305813, 50: 0}),
    (
        "FlatAnnealingWarmupLR",
        dict(total_steps=50, warmup_steps=5, pct_start=0.4, eta_min=0.02),
        {0: 0.02, 4: 0.1, 22: 0.1, 30: 0.087449666, 50: 0.02},
    ),
    (
        "LinearWarmupLR",
        dict(total_steps=50, warmup_steps=5),
        {0: 0.016666667, 4: 0.083333333, 5: 0.1, 20: 0.066666667, 50: 0},
    ),
    ("MultiStepLR", dict(total_steps=10, milestones=[2, 5]), {1: 0.1, 2: 0.01, 5: 0.001}),
    (
        "MultiStepWarmupLR",
        dict(total_steps=50, warmup_steps=2, milestones=[1, 4, 11], gamma=0.3),
        {0: 0.05, 1: 0.1, 3: 0.1, 4: 0.03, 11: 0.009},
    ),
    ("OneCycleLR", dict(total_steps=50), {0: 0.004, 5: 0.031173581, 14: 0.1, 30: 0.056711836, 49: 4e-07}),
    (
        "OneCycleLR",
        dict(total_steps=50, pct_start=0.05, anneal_strategy="linear"),
        {0: 0.004, 1: 0.068, 2: 0.098947373, 30: 0.04000024, 49: 4e-07},
    ),
    ("PolynomialLR", dict(total_steps=7), {0: 0.1, 3: 0.057185714, 7: 0.0001}),
    (
        "PolynomialWarmupLR",
        dict(total_steps=50, warmup_steps=5, power=2.0, end_lr=0.0),
        {0: 0.02, 4: 0.1, 5: 0.1, 20: 0.044444444, 50: 0},
    ),
    ("StepLR", dict(total_steps=10, step_size=3, gamma=0.5), {2: 0.1, 3: 0.05, 9: 0.0125}),
    ("ExponentialLR", dict(total_steps=50, gamma=0.97), {0: 0.1, 20: 0.054379434, 50: 0.021806538}),
]


@pytest.mark.parametrize("name, arguments, rates", GOLDEN)
def test_rates_of_colossal_ai(name: str, arguments: dict[str, Any], rates: dict[int, float]) -> None:
    rate = schedule(name, learning_rate=0.1, **arguments)
    np.testing.assert_allclose([rate(step) for step in rates], list(rates.values()), rtol=2e-6, atol=1e-8)


STEPS = np.arange(303)  # of one length for all examples of a property: each new one would compile again
lengths = st.tuples(st.integers(2, 200), st.integers(0, 199)).map(lambda both: (both[0], both[1] % both[0]))
ENDS = {  # the argument that says where the curve ends; without one, at 0
    "cosine_annealing_warmup_lr": "eta_min",
    "flat_annealing_warmup_lr": "eta_min",
    "polynomial_warmup_lr": "end_lr",
    "linear_warmup_lr": None,
}


@pytest.mark.parametrize("name, key", ENDS.items())
@settings(max_examples=25)
@given(length=lengths, peak=st.floats(1e-5, 30), share=st.floats(0, 1))
def test_up_to_the_rate_then_down_to_the_end_and_no_jump(
    name: str, key: str | None, length: tuple[int, int], peak: float, share: float
) -> None:
    total, warmup = length
    end = {key: share * peak} if key else {}
    rate = schedule(name, learning_rate=peak, total_steps=total, warmup_steps=warmup, **end)
    rates = np.asarray(rate(STEPS))[: total + 3] / peak
    up, down, ulp = rates[: warmup + 1], rates[warmup:], 1e-6
    assert np.all(np.diff(up) >= -ulp) and np.all(np.diff(down) <= ulp)
    assert 0 < rates[0] and abs(rates[warmup] - 1) < ulp and np.max(rates) < 1 + ulp
    np.testing.assert_allclose(rates[total:], share if key else 0.0, atol=ulp)
    if warmup:  # the step onto the curve is no longer than a step of the warm-up
        assert rates[warmup] - rates[warmup - 1] <= 1 / (warmup + 1) + ulp


@settings(max_examples=25)
@given(total=st.integers(1, 300), share=st.floats(0, 1), shape=st.sampled_from(["cos", "linear"]))
def test_one_cycle_rises_once_and_falls_once(total: int, share: float, shape: str) -> None:
    rate = schedule("one_cycle_lr", learning_rate=1.0, total_steps=total, pct_start=share, anneal_strategy=shape)
    rates = np.asarray(rate(STEPS))[:total]
    assert np.all(np.isfinite(rates)) and rates.min() > 0 and rates.max() < 1 + 1e-6
    top = int(np.argmax(rates))
    assert np.all(np.diff(rates[: top + 1]) >= -1e-6) and np.all(np.diff(rates[top:]) <= 1e-6)
    assert abs(top - (share * total - 1)) <= 1 or top == 0


def test_stairs_drop_on_the_step_when_compiled() -> None:
    """optax's own staircase is one step late at 23 of these sizes, 41 the first."""
    for size in (1, 2, 3, 7, 41, 47, 55, 61, 82, 83, 94, 97, 107, 166):
        steps = jnp.arange(12 * size, dtype=jnp.int32)
        rates = jax.jit(jax.vmap(schedules.step_lr(1.0, 1000, size, gamma=0.5)))(steps)
        np.testing.assert_allclose(rates, 0.5 ** (np.arange(12 * size) // size), rtol=1e-6, err_msg=f"step_size={size}")


def test_in_an_optimizer() -> None:
    tx = optax.sgd(schedules.cosine_annealing_warmup_lr(0.1, total_steps=6, warmup_steps=2))
    update = jax.jit(tx.update)
    state, moves = tx.init(jnp.zeros(())), []
    for _ in range(6):
        move, state = update(jnp.ones(()), state)
        moves.append(-float(move))
    np.testing.assert_allclose(moves, [0.05, 0.1, 0.1, 0.0853553, 0.05, 0.0146447], rtol=1e-5)


def test_lambda_is_asked_once_for_each_step() -> None:
    asked: list[int] = []
    rate = schedules.lambda_lr(0.1, 5, lambda step: asked.append(step) or 1.0)
    rate(0), rate(5), rate(7)
    assert asked == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "batch, base, rule, wanted",
    [
        (256, 256, "linear", 0.1),
        (8192, 256, "linear", 3.2),  # Goyal et al., 2017: ImageNet in an hour
        (128, 256, "linear", 0.05),
        (1024, 256, "sqrt", 0.2),
        (64, 256, "sqrt", 0.05),
    ],
)
def test_scaled_rates(batch: int, base: int, rule: Any, wanted: float) -> None:
    assert math.isclose(schedules.scale_rate(0.1, batch, base, rule), wanted)


def test_lamb_rates_for_bert_follow_the_square_root() -> None:
    """You et al., 2020: 5 / (2^k 1000), k = 3 at batch 512 and 0 at 32768, half a power of two for each doubling."""
    for doublings in range(7):
        rate = schedules.scale_rate(5 / 8e3, 512 * 2**doublings, 512, "sqrt")
        assert math.isclose(rate, 5 / (2 ** (3 - doublings / 2) * 1e3))


@given(batches=st.lists(st.integers(1, 10**6), min_size=3, max_size=3), rule=st.sampled_from(["linear", "sqrt"]))
def test_scaling_twice_is_scaling_once(batches: list[int], rule: Any) -> None:
    small, middle, large = batches
    there = schedules.scale_rate(schedules.scale_rate(0.1, middle, small, rule), large, middle, rule)
    assert math.isclose(there, schedules.scale_rate(0.1, large, small, rule), rel_tol=1e-12)


def test_both_spellings_are_one_schedule() -> None:
    colossal = """CosineAnnealingLR CosineAnnealingWarmupLR FlatAnnealingLR FlatAnnealingWarmupLR LinearWarmupLR
        MultiStepLR MultiStepWarmupLR OneCycleLR PolynomialLR PolynomialWarmupLR LambdaLR MultiplicativeLR StepLR
        ExponentialLR""".split()
    needed = {"MultiStepLR": dict(milestones=[3]), "MultiStepWarmupLR": dict(milestones=[3])}
    needed |= dict.fromkeys(("LambdaLR", "MultiplicativeLR"), dict(lr_lambda=halves))
    snakes = [name for name in schedules._SCHEDULES if name.endswith("_lr")]
    assert sorted(name.lower() for name in colossal) == sorted(name.replace("_", "") for name in snakes)
    for name in colossal:
        snake = next(snake for snake in snakes if snake.replace("_", "") == name.lower())
        arguments = dict(learning_rate=0.1, total_steps=9, **needed.get(name, {}))
        assert float(schedule(name, **arguments)(4)) == float(getattr(schedules, snake)(**arguments)(4))


WRONG = {
    "rate of 0": (lambda: schedules.cosine_annealing_lr(0.0, 9), "learning_rate is 0.0; .*above 0, such as"),
    "rate below 0": (lambda: schedules.step_lr(-0.1, 9), "learning_rate is -0.1"),
    "no rate": (lambda: schedules.linear_warmup_lr(math.nan, 9), "learning_rate is nan; it must be finite"),
    "endless rate": (lambda: schedules.lambda_lr(math.inf, 9, halves), "learning_rate is inf"),
    "no steps": (lambda: schedules.exponential_lr(0.1, 0), "total_steps is 0; it must be a whole number, at least 1"),
    "steps below 0": (lambda: schedules.multiplicative_lr(0.1, -3, halves), "total_steps is -3"),
    "parts of steps": (lambda: schedules.polynomial_lr(0.1, 1e4), "total_steps is 10000.0; it must be a whole"),  # type: ignore
    "warm-up below 0": (lambda: schedules.linear_warmup_lr(0.1, 9, -1), "warmup_steps is -1; .*at least 0"),
    "all warm-up": (lambda: schedules.cosine_annealing_warmup_lr(0.1, 9, 9), "warmup_steps=9 .*total_steps=9; .*=8 or"),
    "long warm-up": (lambda: schedules.multi_step_warmup_lr(0.1, 9, 12, [3]), "warmup_steps=12 leaves nothing"),
    "end above": (lambda: schedules.cosine_annealing_lr(0.1, 9, 0.2), "eta_min is 0.2; it must be from 0 to 0.1"),
    "end below 0": (lambda: schedules.flat_annealing_warmup_lr(0.1, 9, eta_min=-1.0), "eta_min is -1.0"),
    "default end above": (lambda: schedules.polynomial_lr(5e-5, 9), "end_lr is 0.0001; .* 0 to 5e-05, .*end_lr=0.0"),
    "power": (lambda: schedules.polynomial_lr(0.1, 9, power=0.0), "power is 0.0"),
    "gamma": (lambda: schedules.exponential_lr(0.1, 9, gamma=0.0), "gamma is 0.0"),
    "step size": (lambda: schedules.step_lr(0.1, 9, step_size=0), "step_size is 0; it must be a whole number"),
    "no milestones": (lambda: schedules.multi_step_lr(0.1, 9), r"milestones is \(\); .*such as milestones=\[30, 60\]"),
    "early milestone": (lambda: schedules.multi_step_lr(0.1, 9, [4, -2]), "milestones is -2; .*at least 0"),
    "share": (lambda: schedules.flat_annealing_lr(0.1, 9, 72), "pct_start is 72; it must be from 0 to 1"),
    "cycle's share": (lambda: schedules.one_cycle_lr(0.1, 9, -0.1), "pct_start is -0.1"),
    "cycle's shape": (lambda: schedules.one_cycle_lr(0.1, 9, anneal_strategy="cosine"), "write anneal_strategy='cos'"),  # type: ignore
    "cycle's factor": (lambda: schedules.one_cycle_lr(0.1, 9, div_factor=0.0), "div_factor is 0.0"),
    "lambda's rate": (lambda: schedules.lambda_lr(0.1, 9, lambda step: 4.0 - step), r"lr_lambda .*at step \[5\]"),
    "warm-up of 2.5 steps": (
        lambda: schedules.warmup_polynomial(0.1, 9, warmup=2.5),
        "warmup=2.5; write a whole number of steps, or a share",
    ),
    "share of warm-up below 0": (lambda: schedules.warmup_polynomial(0.1, 9, warmup=-0.5), "warmup_steps is -4"),
    "rule": (lambda: schedules.scale_rate(0.1, 8, 4, "square"), "rule is 'square'; write rule='linear' or"),  # type: ignore
    "batch": (lambda: schedules.scale_rate(0.1, 0, 4), "batch is 0; it must be finite and above 0"),
    "name": (lambda: schedule("cosine_anealing_lr"), "called 'cosine_anealing_lr'; did you mean cosine_annealing_lr?"),
    "Colossal-AI's name": (lambda: schedule("OneCicleLR"), "did you mean one_cycle_lr?"),
    "no such name": (lambda: schedule("xyz"), "there are cosine_annealing_lr, .*exponential_lr"),
    "argument": (lambda: schedule("StepLR", stepsize=3), "step_lr has no argument 'stepsize'; did you mean step_size?"),
    "no such argument": (lambda: schedule("StepLR", x=3), "there are learning_rate, total_steps, step_size, gamma"),
}


@pytest.mark.parametrize("call, message", WRONG.values(), ids=WRONG)
def test_errors_say_what_was_given_and_what_to_write(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
