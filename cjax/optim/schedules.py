"""Rates over steps: Colossal-AI's schedulers under their own names, and what large batches need. Knows optax alone.

A schedule maps t, the number of updates made so far, to the rate of the next one: training asks for t = 0 .. T - 1.
Throughout, `learning_rate` is the highest rate; `total_steps`, T, and `warmup_steps`, W, are counted in updates. A
warm-up gives (t + 1) / W of the rate for t < W (W = 0 leaves it out), and the curve after it counts from W. Curves that
have an end stay there from T on. The values are those of Colossal-AI 0.5 on the PyTorch it was released for.

All of them raise ValueError for a rate or a factor that is not above 0, an end above the rate that falls to it, steps
that are no whole number of at least 1, a share that is not from 0 to 1, and a warm-up not shorter than the whole.
"""

import inspect
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax


def scale_rate(rate: float, batch: int, base_batch: int, rule: Literal["linear", "sqrt"] = "linear") -> float:
    """`rate` x k, or `rate` x sqrt(k), for a batch k = `batch` / `base_batch` times as large (both in examples).

    "linear" keeps the mean of what an epoch adds: SGD, by Goyal et al., "Accurate, Large Minibatch SGD", 2017. "sqrt"
    keeps its variance: Krizhevsky, "One Weird Trick", 2014, and LAMB, by You et al., "BERT in 76 Minutes", 2020.

    Args:
        rate: at the base batch, above 0.
        batch: examples of the batch that is trained with.
        base_batch: examples of the batch that `rate` was found for.
        rule: "linear" or "sqrt".

    Raises:
        ValueError: a number that is not above 0, or another rule.

    >>> scale_rate(0.1, batch=8192, base_batch=256), scale_rate(0.625e-3, batch=32768, base_batch=512, rule="sqrt")
    (3.2, 0.005)
    """
    _check_positive(rate=rate, batch=batch, base_batch=base_batch)
    _need(rule in ("linear", "sqrt"), f"rule is {rule!r}; write rule='linear' or rule='sqrt'")
    return rate * (batch / base_batch) ** (1.0 if rule == "linear" else 0.5)


def warmup_polynomial(
    learning_rate: float, total_steps: int, warmup: float = 0, power: float = 1.0, end_lr: float = 0.0
) -> optax.Schedule:
    """`polynomial_warmup_lr` as LARS and LAMB were trained: down to 0, with the warm-up as their papers give it.

    The curve has no jump; BERT's own code counts the decay from step 0, and drops by W / T where the warm-up ends.

    Args:
        learning_rate: the highest rate, above 0.
        total_steps: T, at least 1.
        warmup: W, or below 1 the share W / T; LAMB's is 1/320 at batch 512 and doubles with it, to 1/5 at 32768.
        power: 2 for LARS (You et al., "Large Batch Training of Convolutional Networks", 2017), 1 for LAMB (2020).
        end_lr: the rate from T on.

    Raises:
        ValueError: a number out of its bounds, or a warm-up of 1 or more that is not whole.

    >>> print(np.array_str(warmup_polynomial(0.005, total_steps=8, warmup=1 / 4)(np.arange(9)), precision=4))
    [0.0025 0.005  0.005  0.0042 0.0033 0.0025 0.0017 0.0008 0.    ]
    """
    _check(total_steps)
    warmup_steps = round(warmup * total_steps) if warmup < 1 else int(warmup)
    _need(warmup < 1 or warmup == warmup_steps, f"{warmup=}; write a whole number of steps, or a share of them below 1")
    return polynomial_warmup_lr(learning_rate, total_steps, warmup_steps, end_lr, power)


def cosine_annealing_lr(learning_rate: float, total_steps: int, eta_min: float = 0.0) -> optax.Schedule:
    """Half a cosine: eta_min + (learning_rate - eta_min) (1 + cos(pi t / T)) / 2.

    Loshchilov and Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts", 2017, without the restarts.

    Args:
        learning_rate: the highest rate, above 0.
        total_steps: T, at least 1.
        eta_min: the rate at the end, from 0 to `learning_rate`.

    Raises:
        ValueError: a number out of its bounds, with what to write.

    >>> print(np.array_str(cosine_annealing_lr(0.1, total_steps=4)(np.arange(5)), precision=3))
    [0.1   0.085 0.05  0.015 0.   ]
    """
    return cosine_annealing_warmup_lr(learning_rate, total_steps, 0, eta_min)


def cosine_annealing_warmup_lr(
    learning_rate: float, total_steps: int, warmup_steps: int = 0, eta_min: float = 0.0
) -> optax.Schedule:
    """Warm-up, then half a cosine to `eta_min` over the T - W steps that are left.

    Args:
        learning_rate: the highest rate, above 0.
        total_steps: T, at least 1.
        warmup_steps: W, updates of the warm-up, fewer than T; 0 leaves it out.
        eta_min: the rate at the end, from 0 to `learning_rate`.

    Raises:
        ValueError: a number out of its bounds, with what to write.

    >>> print(np.array_str(cosine_annealing_warmup_lr(0.1, total_steps=6, warmup_steps=2)(np.arange(7)), precision=3))
    [0.05  0.1   0.1   0.085 0.05  0.015 0.   ]
    """
    return flat_annealing_warmup_lr(learning_rate, total_steps, warmup_steps, 0.0, eta_min)


def flat_annealing_lr(learning_rate: float, total_steps: int, pct_start: float = 0.72) -> optax.Schedule:
    """The rate itself for `pct_start` of all steps (a share, 0 to 1), then half a cosine to 0.

    Args:
        learning_rate: the highest rate, above 0.
        total_steps: T, at least 1.
        pct_start: the share of the steps that stay at the rate, 0 to 1.

    Raises:
        ValueError: a number out of its bounds, with what to write.

    >>> print(np.array_str(flat_annealing_lr(0.1, total_steps=6, pct_start=0.4)(np.arange(7)), precision=3))
    [0.1   0.1   0.1   0.085 0.05  0.015 0.   ]
    """
    return flat_annealing_warmup_lr(learning_rate, total_steps, 0, pct_start)


def flat_annealing_warmup_lr(
    learning_rate: float, total_steps: int, warmup_steps: int = 0, pct_start: float = 0.72, eta_min: float = 0.0
) -> optax.Schedule:
    """Warm-up, the rate itself for `pct_start` of the steps left (a share, 0 to 1), then half a cosine to `eta_min`.

    Args:
        learning_rate: the highest rate, above 0.
        total_steps: T, at least 1.
        warmup_steps: W, updates of the warm-up, fewer than T; 0 leaves it out.
        pct_start: the share of the steps behind the warm-up that stay at the rate, 0 to 1.
        eta_min: the rate at the end, from 0 to `learning_rate`.

    Raises:
        ValueError: a number out of its bounds, with what to write.

    >>> rate = flat_annealing_warmup_lr(0.1, total_steps=8, warmup_steps=2, pct_start=0.4)
    >>> print(np.array_str(rate(np.arange(9)), precision=3))
    [0.05  0.1   0.1   0.1   0.1   0.085 0.05  0.015 0.   ]
    """
    _check(total_steps, warmup_steps, learning_rate=learning_rate)
    _check_at_most("eta_min", eta_min, learning_rate)
    _check_at_most("pct_start", pct_start, 1)
    flat_steps = int((total_steps - warmup_steps) * pct_start)
    flat = cosine = optax.constant_schedule(learning_rate)
    if anneal_steps := total_steps - warmup_steps - flat_steps:  # none when pct_start is 1
        cosine = optax.cosine_decay_schedule(learning_rate, anneal_steps, eta_min / learning_rate)
    return _warm_up(learning_rate, warmup_steps, optax.join_schedules([flat, cosine], [flat_steps]))


def linear_warmup_lr(learning_rate: float, total_steps: int, warmup_steps: int = 0) -> optax.Schedule:
    """(t + 1) / (W + 1) of the rate for t < W, then (T - t) / (T - W) of it: the one warm-up divided by W + 1.

    Args:
        learning_rate: the highest rate, above 0.
        total_steps: T, at least 1.
        warmup_steps: W, updates of the warm-up, fewer than T; 0 leaves it out.

    Raises:
        ValueError: a number out of its bounds, with what to write.

    >>> print(np.array_str(linear_warmup_lr(0.1, total_steps=8, warmup_steps=3)(np.arange(9)), precision=3))
    [0.025 0.05  0.075 0.1   0.08  0.06  0.04  0.02  0.   ]
    """
    _check(total_steps, warmup_steps, learning_rate=learning_rate)
    up = optax.linear_schedule(learning_rate / (warmup_steps + 1), learning_rate, max(1, warmup_steps))
    down = optax.linear_schedule(learning_rate, 0.0, total_steps - warmup_steps)
    return optax.join_schedules([up, down], [warmup_steps])


def multi_step_lr(
    learning_rate: float, total_steps: int, milestones: Sequence[int] = (), gamma: float = 0.1
) -> optax.Schedule:
    """The rate, times `gamma` from each of `milestones` on (steps, at least one of them). T changes nothing.

    Args:
        learning_rate: the highest rate, above 0.
        total_steps: T, at least 1; it changes nothing else.
        milestones: updates at which the rate drops, at least one; one that comes twice drops twice.
        gamma: the factor, above 0.

    Raises:
        ValueError: a number out of its bounds, with what to write.

    >>> print(np.array_str(multi_step_lr(0.1, total_steps=7, milestones=[2, 5])(np.arange(7)), precision=3))
    [0.1   0.1   0.01  0.01  0.01  0.001 0.001]
    """
    return multi_step_warmup_lr(learning_rate, total_steps, 0, milestones, gamma)


def multi_step_warmup_lr(
    learning_rate: float, total_steps: int, warmup_steps: int = 0, milestones: Sequence[int] = (), gamma: float = 0.1
) -> optax.Schedule:
    """Warm-up, then `multi_step_lr`; milestones count from step 0, and those below W are left out.

    Args:
        learning_rate: the highest rate, above 0.
        total_steps: T, at least 1, more than W.
        warmup_steps: W, updates of the warm-up, fewer than T; 0 leaves it out.
        milestones: as in `multi_step_lr`.
        gamma: the factor, above 0.

    Raises:
        ValueError: a number out of its bounds, with what to write.

    >>> rate = multi_step_warmup_lr(0.1, total_steps=7, warmup_steps=2, milestones=[3, 5])
    >>> print(np.array_str(rate(np.arange(7)), precision=3))
    [0.05  0.1   0.1   0.01  0.01  0.001 0.001]
    """
    _check(total_steps, warmup_steps, learning_rate=learning_rate, gamma=gamma)
    _need(len(milestones) > 0, f"milestones is {milestones}; give the steps of the drops, such as milestones=[30, 60]")
    _check_whole("milestones", min(milestones), 0)
    scales = {step - warmup_steps: gamma**times for step, times in Counter(milestones).items() if step >= warmup_steps}
    return _warm_up(learning_rate, warmup_steps, optax.piecewise_constant_schedule(learning_rate, scales))


def one_cycle_lr(
    learning_rate: float,
    total_steps: int,
    pct_start: float = 0.3,
    anneal_strategy: Literal["cos", "linear"] = "cos",
    div_factor: float = 25.0,
    final_div_factor: float = 10000.0,
) -> optax.Schedule:
    """From learning_rate / div_factor up to learning_rate at t = pct_start T - 1, then far below the start at T - 1.

    Args:
        learning_rate: the highest rate, above 0.
        total_steps: T, at least 1.
        pct_start: the share of the steps that go up, 0 to 1.
        anneal_strategy: "cos" or "linear", the shape of both ways.
        div_factor, final_div_factor: peak over start, and start over end; both above 0.

    Raises:
        ValueError: a number out of its bounds, or another strategy.

    Smith and Topin, "Super-Convergence", 2018. Colossal-AI cycles the momentum as well; here it is the optimizer's.

    >>> print(np.array_str(one_cycle_lr(0.1, 6, pct_start=0.5, final_div_factor=4)(np.arange(6)), precision=3))
    [0.004 0.052 0.1   0.075 0.026 0.001]
    """
    _check(total_steps, learning_rate=learning_rate, div_factor=div_factor, final_div_factor=final_div_factor)
    _check_at_most("pct_start", pct_start, 1)
    _need(anneal_strategy in ("cos", "linear"), f"{anneal_strategy=}; write anneal_strategy='cos' or 'linear'")
    # Not optax's: its peak is at a whole step and its end at T. Here the peak is at pct_start T - 1, whole or not (a
    # small share puts it before step 0), and the end at T - 1, the last step that is taken.
    turns = np.array([min(0.0, pct_start * total_steps - 1), pct_start * total_steps - 1, total_steps - 1])
    start = learning_rate / div_factor

    def rate(count: jax.typing.ArrayLike) -> jax.Array:
        away = jnp.interp(count, turns, np.array([-1.0, 0.0, 1.0]))  # from the peak: -1 is the start, 1 the end
        share = jnp.abs(away) if anneal_strategy == "linear" else (1 - jnp.cos(jnp.pi * away)) / 2
        return learning_rate + (jnp.where(away < 0, start, start / final_div_factor) - learning_rate) * share

    return rate


def polynomial_lr(learning_rate: float, total_steps: int, end_lr: float = 0.0001, power: float = 1.0) -> optax.Schedule:
    """A power of what is left: end_lr + (learning_rate - end_lr) (1 - t / T)^power.

    Args:
        learning_rate: the highest rate, above 0.
        total_steps: T, at least 1.
        end_lr: the rate from T on, from 0 to `learning_rate`.
        power: above 0; 1 is a line.

    Raises:
        ValueError: a number out of its bounds, with what to write.

    >>> print(np.array_str(polynomial_lr(0.1, total_steps=5, end_lr=0.0, power=2.0)(np.arange(6)), precision=3))
    [0.1   0.064 0.036 0.016 0.004 0.   ]
    """
    return polynomial_warmup_lr(learning_rate, total_steps, 0, end_lr, power)


def polynomial_warmup_lr(
    learning_rate: float, total_steps: int, warmup_steps: int = 0, end_lr: float = 0.0001, power: float = 1.0
) -> optax.Schedule:
    """Warm-up, then `polynomial_lr` over the T - W steps that are left.

    Args:
        learning_rate: the highest rate, above 0.
        total_steps: T, at least 1.
        warmup_steps: W, updates of the warm-up, fewer than T; 0 leaves it out.
        end_lr: the rate from T on, from 0 to `learning_rate`.
        power: above 0; 1 is a line.

    Raises:
        ValueError: a number out of its bounds, with what to write.

    >>> print(np.array_str(polynomial_warmup_lr(0.1, 6, warmup_steps=2, end_lr=0.02)(np.arange(7)), precision=3))
    [0.05 0.1  0.1  0.08 0.06 0.04 0.02]
    """
    _check(total_steps, warmup_steps, learning_rate=learning_rate, power=power)
    _check_at_most("end_lr", end_lr, learning_rate)
    decay = optax.polynomial_schedule(learning_rate, end_lr, power, total_steps - warmup_steps)
    return _warm_up(learning_rate, warmup_steps, decay)


def lambda_lr(learning_rate: float, total_steps: int, lr_lambda: Callable[[int], float]) -> optax.Schedule:
    """learning_rate x lr_lambda(t); `lr_lambda` is any Python, asked once for each of 0 .. T, and T's value stays.

    Args:
        learning_rate: what `lr_lambda` is multiplied with, above 0.
        total_steps: T, at least 1: the last step that `lr_lambda` is asked for.
        lr_lambda: takes the number of updates made so far, an int, and gives the factor.

    Raises:
        ValueError: a rate that is not finite or below 0, with the step.

    >>> print(lambda_lr(0.1, total_steps=5, lr_lambda=lambda step: 1.0 if step < 2 else 0.5)(np.arange(5)))
    [0.1  0.1  0.05 0.05 0.05]
    """
    _check(total_steps, learning_rate=learning_rate)
    # A table, because arbitrary Python (`if`, `min`, `math`) fails on the traced step of a compiled update.
    rates = learning_rate * np.array([float(lr_lambda(step)) for step in range(total_steps + 1)])
    wrong = np.flatnonzero(~(np.isfinite(rates) & (rates >= 0)))
    _need(not wrong.size, f"lr_lambda makes a rate that is not finite, or below 0, at step {wrong[:1]}; mend it there")
    return lambda count: jnp.take(rates, count, mode="clip")


def multiplicative_lr(learning_rate: float, total_steps: int, lr_lambda: Callable[[int], float]) -> optax.Schedule:
    """learning_rate x lr_lambda(1) x .. x lr_lambda(t), with `lr_lambda` as in `lambda_lr`.

    Args:
        learning_rate: the rate at t = 0, above 0.
        total_steps: T, at least 1: the last step that `lr_lambda` is asked for.
        lr_lambda: takes the number of updates made so far, an int from 1 on, and gives the factor.

    Raises:
        ValueError: a rate that is not finite or below 0, with the step.

    >>> print(multiplicative_lr(0.1, total_steps=4, lr_lambda=lambda step: 0.5 if step % 2 else 1.0)(np.arange(5)))
    [0.1   0.05  0.05  0.025 0.025]
    """
    _check(total_steps, learning_rate=learning_rate)
    factors = np.cumprod([1.0, *(float(lr_lambda(step)) for step in range(1, total_steps + 1))])
    return lambda_lr(learning_rate, total_steps, lambda step: factors[step])


def step_lr(learning_rate: float, total_steps: int, step_size: int = 1, gamma: float = 0.1) -> optax.Schedule:
    """learning_rate gamma^floor(t / step_size): times `gamma` every `step_size` steps. T changes nothing.

    Args:
        learning_rate: the rate at t = 0, above 0.
        total_steps: T, at least 1; it changes nothing else.
        step_size: updates from one drop to the next, at least 1.
        gamma: the factor, above 0.

    Raises:
        ValueError: a number out of its bounds, with what to write.

    >>> print(np.array_str(step_lr(0.1, total_steps=7, step_size=3)(np.arange(7)), precision=3))
    [0.1   0.1   0.1   0.01  0.01  0.01  0.001]
    """
    _check_whole("step_size", step_size, 1)
    decay = exponential_lr(learning_rate, total_steps, gamma)
    # A quotient of whole numbers: optax's `staircase` floors t x (1 / step_size) when compiled, and so drops one step
    # late for some sizes (41 and 47 are the first).
    return lambda count: decay(jnp.floor_divide(count, step_size))


def exponential_lr(learning_rate: float, total_steps: int, gamma: float = 1.0) -> optax.Schedule:
    """learning_rate gamma^t; `gamma` above 1 grows, as in a search for the highest rate. T changes nothing.

    Args:
        learning_rate: the rate at t = 0, above 0.
        total_steps: T, at least 1; it changes nothing else.
        gamma: the factor, above 0.

    Raises:
        ValueError: a number out of its bounds, with what to write.

    >>> print(np.array_str(exponential_lr(0.1, total_steps=4, gamma=0.5)(np.arange(4)), precision=3))
    [0.1   0.05  0.025 0.013]
    """
    _check(total_steps, learning_rate=learning_rate, gamma=gamma)
    return optax.exponential_decay(learning_rate, 1, gamma)


_FUNCTIONS: tuple[Callable[..., optax.Schedule], ...] = (
    *(cosine_annealing_lr, cosine_annealing_warmup_lr, flat_annealing_lr, flat_annealing_warmup_lr, linear_warmup_lr),
    *(multi_step_lr, multi_step_warmup_lr, one_cycle_lr, polynomial_lr, polynomial_warmup_lr, warmup_polynomial),
    *(lambda_lr, multiplicative_lr, step_lr, exponential_lr),
)
_SCHEDULES = {function.__name__: function for function in _FUNCTIONS}


def schedule(name: str, /, **arguments: Any) -> optax.Schedule:
    """The schedule that a configuration names: `cosine_annealing_lr`, or as Colossal-AI does, `CosineAnnealingLR`.

    Args:
        name: of a function of this module, or the class that Colossal-AI has for it.
        arguments: that function's.

    Raises:
        ValueError: a name or an argument that does not exist, with the nearest that does; or what the function refuses.

    >>> print(np.array_str(schedule("CosineAnnealingLR", learning_rate=0.1, total_steps=4)(np.arange(5)), precision=3))
    [0.1   0.085 0.05  0.015 0.   ]
    """
    key = re.sub("(?<=[a-z])(?=[A-Z])", "_", name).lower()
    _need(key in _SCHEDULES, f"no schedule is called {name!r}; {_instead(key, _SCHEDULES)}")
    known = inspect.signature(_SCHEDULES[key]).parameters
    for given in arguments:
        _need(given in known, f"{key} has no argument {given!r}; {_instead(given, known)}")
    return _SCHEDULES[key](**arguments)


def _warm_up(rate: float, num_steps: int, after: optax.Schedule) -> optax.Schedule:
    # From rate / W, not 0: the first update already moves. The line's end, one step too far, is never used.
    steps = max(1, num_steps)
    ramp = optax.linear_schedule(rate / steps, rate * (steps + 1) / steps, steps)
    return optax.join_schedules([ramp, after], [num_steps])


def _instead(wrong: str, names: Iterable[str]) -> str:
    near = get_close_matches(wrong, names, 1)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"


def _check(total_steps: int, warmup_steps: int = 0, **positive: float) -> None:
    _check_positive(**positive)
    _check_whole("total_steps", total_steps, 1)
    _check_whole("warmup_steps", warmup_steps, 0)
    most = total_steps - 1
    _need(warmup_steps <= most, f"{warmup_steps=} leaves nothing of {total_steps=}; write warmup_steps={most} or less")


def _check_whole(name: str, value: int, least: int) -> None:
    fits = isinstance(value, int | np.integer) and value >= least
    _need(fits, f"{name} is {value}; it must be a whole number, at least {least}, such as {name}=100")


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        _need(0 < value < math.inf, f"{name} is {value}; it must be finite and above 0, such as {name}=0.1")


def _check_at_most(name: str, value: float, most: float) -> None:
    _need(0 <= value <= most, f"{name} is {value}; it must be from 0 to {most}, such as {name}=0.0")


def _need(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)
