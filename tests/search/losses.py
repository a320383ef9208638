"""Random losses under micro-batches: equal to the undivided batch, or refused.

    python tests/search/losses.py --count 1000 --seed 0

A loss is a recipe: terms, each made of a source, operations on it, a reduction and a factor; and values of aux, made
alike. Recipes are data, so that one which fails can be made smaller. The reference is plain JAX on the whole batch, in
float64; loss, every gradient and aux must agree to 1e-9, or `cjax.parallelize` must refuse.
"""

import argparse
import collections
import random
import sys
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import cjax

BATCH, SEQ, DIM, CLASSES = 8, 3, 5, 4
PLANS = ("microbatches=2", "microbatches=4", "data=2 microbatches=2", "data=2 microbatches=2 zero=2", "microbatches=8",
         "data=2 microbatches=4")  # fmt: skip
TOLERANCE = 1e-9


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = jnp.tanh(nn.Dense(6, param_dtype=jnp.float64)(x))
        return nn.Dense(CLASSES, param_dtype=jnp.float64)(h)


def make_batch(seed: int) -> dict:
    r = np.random.default_rng(seed)
    m = (r.random((BATCH, SEQ)) < np.linspace(0.3, 1, BATCH)[:, None]).astype(np.float64)
    m[:, 0] = 1  # no micro-batch counts nothing
    return {
        "x": r.normal(size=(BATCH, SEQ, DIM)),
        "y": r.integers(0, CLASSES, (BATCH, SEQ)),
        "m": m,
        "t": r.normal(size=BATCH),
        "g": r.integers(0, 3, BATCH),
        "s": np.float64(1.7),
    }


# -- sources: [batch, seq] of logits and batch --------------------------------------------------------------------
SOURCES = {
    "ce": lambda z, b: optax.softmax_cross_entropy_with_integer_labels(z, b["y"]),
    "onehot": lambda z, b: -(jax.nn.log_softmax(z) * jax.nn.one_hot(b["y"], CLASSES)).sum(-1),
    "picked": lambda z, b: jnp.take_along_axis(z, b["y"][..., None], -1)[..., 0],
    "z": lambda z, b: jax.nn.logsumexp(z, -1) ** 2,
    "square": lambda z, b: (z**2).mean(-1),
    "largest": lambda z, b: z.max(-1),
    "entropy": lambda z, b: -(jax.nn.softmax(z) * jax.nn.log_softmax(z)).sum(-1),
    "target": lambda z, b: (z[..., 0] - b["t"][:, None]) ** 2,
    "hinge": lambda z, b: optax.hinge_loss(z[..., 1], 2.0 * (b["t"] > 0)[:, None] - 1),
    "vmapped": lambda z, b: jax.vmap(lambda a, t: a[:, 0] * t + a[:, 1])(z, b["t"]),
    "noise": lambda z, b: z[..., 2] * b["s"],
    "advantage": lambda z, b: z[..., 0] * ((b["t"] - b["t"].mean()) / (b["t"].std() + 1e-8))[:, None],
}


def scanned(v, b):
    def turn(carry, x):
        carry = 0.5 * carry + jnp.tanh(x)
        return carry, carry

    return jax.lax.scan(turn, jnp.zeros(v.shape[0]), v.T)[1].T


# -- operations: [batch, seq] to [batch, seq]; the later ones look at other rows ---------------------------------------
OPERATIONS = {
    "tanh": lambda v, b: jnp.tanh(v),
    "square": lambda v, b: v**2,
    "half": lambda v, b: v / 2,
    "add": lambda v, b: v + 1.5,
    "mask": lambda v, b: v * b["m"],
    "where": lambda v, b: jnp.where(b["m"] > 0, v, 0.0),
    "where_one": lambda v, b: jnp.where(b["m"] > 0, v, 1.0),
    "cumsum": lambda v, b: jnp.cumsum(v, 1),
    "sort": lambda v, b: jnp.sort(v, 1),
    "flip": lambda v, b: v[:, ::-1],
    "roll": lambda v, b: jnp.roll(v, 1, 1),
    "softmax": lambda v, b: jax.nn.softmax(v, 1),
    "stack": lambda v, b: jnp.stack([v, v**2], 1).sum(1),
    "stack_last": lambda v, b: jnp.stack([v, -v], -1)[..., 0],
    "unstack": lambda v, b: jnp.concatenate([a[:, None] for a in jnp.moveaxis(v, 1, 0)], 1),
    "scan": scanned,
    "flat": lambda v, b: v.reshape(-1).reshape(v.shape),
    "top": lambda v, b: jax.lax.top_k(v, SEQ)[0],
    "cond": lambda v, b: jax.lax.cond(b["s"] > 1, jnp.tanh, lambda a: a, v),
    "map": lambda v, b: jax.vmap(lambda a: jnp.polyval(jnp.ones(2), a))(v),
    "stop": lambda v, b: v * jax.lax.stop_gradient(v),
    "segment": lambda v, b: v * jax.ops.segment_sum(jnp.ones(3), jnp.arange(3), 3).sum(),
    "scale_by_rows": lambda v, b: v * v.shape[0] / v.shape[0],
    "checkpoint": lambda v, b: jax.checkpoint(lambda a: jnp.sin(a))(v),
    "share": lambda v, b: v * b["m"] / b["m"].sum(),
    "per_row": lambda v, b: v / (b["m"].sum(1, keepdims=True) + 1),
    "eye": lambda v, b: v @ jnp.eye(SEQ),
    "gathered": lambda v, b: v[jnp.arange(v.shape[0])[:, None], jnp.arange(SEQ)[None]],
    "labelled": lambda v, b: v[jnp.arange(v.shape[0]), b["y"][:, 0] % SEQ][:, None] + v,
    "set": lambda v, b: v.at[:, 0].set(0.0),
    "set_rows": lambda v, b: v.at[jnp.arange(v.shape[0]), b["y"][:, 0] % SEQ].add(1.0),
    "roll_rows": lambda v, b: v * jnp.roll(v, 1, 0),
    "flip_rows": lambda v, b: v[::-1] * b["m"],
    "sort_rows": lambda v, b: jnp.sort(v, 0) * b["m"],
    "cumsum_rows": lambda v, b: jnp.tanh(jnp.cumsum(v, 0)),
    "first_row": lambda v, b: (v - v[0]) ** 2,
    "last_row": lambda v, b: v * v[-1:],
    "standardised": lambda v, b: jnp.tanh((v - v.mean()) / (v.std() + 1e-3)),
    "centred": lambda v, b: (v - v.mean(0)) ** 2,
    "softmax_rows": lambda v, b: jax.nn.softmax(v, 0) * v,
    "row_numbers": lambda v, b: v * jnp.arange(v.shape[0])[:, None],
    "row_numbers_known": lambda v, b: v * np.linspace(0, 1, v.shape[0])[:, None],
    "row_numbers_added": lambda v, b: v * jnp.cumsum(jnp.ones(v.shape[0]))[:, None],
    "moved": lambda v, b: v[jnp.where(jnp.arange(v.shape[0]) == 0, v.shape[0] - 1, jnp.arange(v.shape[0]))] * v,
    "sorted_by": lambda v, b: v * v[jnp.argsort(b["t"])],
    "log_rows": lambda v, b: v * np.log(v.shape[0]),
    "segments": lambda v, b: v * jax.ops.segment_sum(v[:, 0], b["g"], 3)[b["g"]][:, None],
    "pairs": lambda v, b: (v[:, None] - v[None]).mean(1) ** 2,
    "products": lambda v, b: v @ v.T @ v,
    "even_rows": lambda v, b: jnp.where((jnp.arange(v.shape[0]) % 2 == 0)[:, None], v, 0.0),
    "clipped_by_norm": lambda v, b: v / jnp.maximum(1.0, jnp.linalg.norm(v)),
    "pad_rows": lambda v, b: jnp.pad(v, ((1, 0), (0, 0)))[:-1] * v,
    "mod": lambda v, b: v[(jnp.arange(v.shape[0]) + 1) % v.shape[0]],
    "eye_rows": lambda v, b: jnp.eye(v.shape[0]) @ v,
    "scan_rows": lambda v, b: jax.lax.scan(lambda c, a: (c + a, jnp.tanh(c + a)), jnp.zeros(SEQ), v)[1],
    "map_rows": lambda v, b: jax.lax.map(jnp.tanh, v),
    "associative": lambda v, b: jax.lax.associative_scan(jnp.add, v, axis=0),
}
FINE = list(OPERATIONS)[: list(OPERATIONS).index("roll_rows")]

# -- reductions: [batch, seq] to a scalar ------------------------------------------------------------------------------
REDUCTIONS = {
    "mean": lambda v, b: v.mean(),
    "masked": lambda v, b: (v * b["m"]).sum() / b["m"].sum(),
    "guarded": lambda v, b: (v * b["m"]).sum() / jnp.maximum(b["m"].sum(), 1.0),
    "guarded_high": lambda v, b: (v * b["m"]).sum() / jnp.maximum(b["m"].sum(), 11.0),
    "epsilon": lambda v, b: (v * b["m"]).sum() / (b["m"].sum() + 0.5),
    "where_zero": lambda v, b: (v * b["m"]).sum() / jnp.where(b["m"].sum() == 0, 1.0, b["m"].sum()),
    "where_few": lambda v, b: (v * b["m"]).sum() / jnp.where(b["m"].sum() < 12, 12.0, b["m"].sum()),
    "mean_where": lambda v, b: jnp.mean(v, where=b["m"] > 0),
    "means": lambda v, b: (v * b["m"]).mean() / b["m"].mean(),
    "rows_then": lambda v, b: v.sum(1).mean(),
    "per_row": lambda v, b: ((v * b["m"]).sum(1) / b["m"].sum(1)).mean(),
    "max_then": lambda v, b: v.max(1).mean(),
    "sum_size": lambda v, b: v.sum() / v.size,
    "inverse": lambda v, b: (1 / b["m"].sum()) * (v * b["m"]).sum(),
    "twice": lambda v, b: 2 * (v * b["m"]).sum() / b["m"].sum(),
    "rows_size": lambda v, b: (v / v.shape[0]).sum(),
    "einsum": lambda v, b: jnp.einsum("bs,bs->", v, b["m"]) / b["m"].sum(),
    "other_weight": lambda v, b: (v * (2 - b["m"])).sum() / (2 - b["m"]).sum(),
    "group_weight": lambda v, b: (v * (b["g"] + 1.0)[:, None]).sum() / (b["g"] + 1.0).sum(),
    "vdot": lambda v, b: jnp.vdot(v, v) / v.size,
    "dot_mean": lambda v, b: v.mean(1) @ jnp.ones(v.shape[0]) / v.shape[0],
    "nanmean": lambda v, b: jnp.nanmean(v),
    "average": lambda v, b: jnp.average(v, weights=b["m"]),
    "scan_sum": lambda v, b: jax.lax.scan(lambda c, x: (c + x.sum(), None), 0.0, v.T)[0] / v.size,
    "sum": lambda v, b: v.sum(),
    "sum_known": lambda v, b: v.sum() / (BATCH * SEQ),
    "unbiased": lambda v, b: v.sum() / (v.size - 1),
    "max": lambda v, b: v.max(),
    "root": lambda v, b: jnp.sqrt((v**2).mean() + 1e-3),
    "logsumexp": lambda v, b: jax.nn.logsumexp(v),
    "variance": lambda v, b: v.var(),
    "median": lambda v, b: jnp.median(v),
    "first": lambda v, b: v[0].mean(),
    "balance": lambda v, b: (jax.nn.softmax(v, 1).mean(0) ** 2).sum(),
    "exp_mean": lambda v, b: jnp.exp(-(v.mean() ** 2)),
    "trained_weight": lambda v, b: (v**2 * b["m"]).sum() / (v**2 + 1).sum(),
    "per_class": lambda v, b: (jax.ops.segment_sum(v.sum(1), b["g"], 3) / (1 + jnp.bincount(b["g"], length=3))).mean(),
    "quotient": lambda v, b: v.mean() / (1 + (v**2).mean()),
    "top": lambda v, b: jax.lax.top_k(v.mean(1), 2)[0].mean(),
    "sum_root": lambda v, b: v.sum() / np.sqrt(v.shape[0]),
    "by_length": lambda v, b: v.sum() / jnp.ones(v.shape[0]).sum() ** 2,
    "mean_and_sum": lambda v, b: (v.sum() + 1.0) / v.size,
}


@dataclass(frozen=True)
class Term:
    source: str
    operations: tuple[str, ...]
    reduction: str
    factor: float

    def __call__(self, logits, batch):
        value = SOURCES[self.source](logits, batch)
        for name in self.operations:
            value = OPERATIONS[name](value, batch)
        return self.factor * REDUCTIONS[self.reduction](value, batch)


@dataclass(frozen=True)
class Recipe:
    """A loss: the sum of its terms; `how` says what is returned of it."""

    terms: tuple[Term, ...]
    aux: tuple[Term, ...] = ()
    how: str = "scalar"
    plan: str = PLANS[0]

    def loss(self, model, batch):
        logits = model(batch["x"])
        value = sum(term(logits, batch) for term in self.terms)
        if self.how == "mean":
            rows = jnp.sum(jnp.ones_like(batch["t"]))
            value = cjax.Mean(value * rows, rows)
        return (value, {str(i): term(logits, batch) for i, term in enumerate(self.aux)}) if self.aux else value


def draw(r: random.Random) -> Recipe:
    """A recipe: most terms of parts that can be right, some of any."""

    def term() -> Term:
        names = list(OPERATIONS) if r.random() < 0.25 else FINE
        operations = tuple(r.choice(names) for _ in range(r.choice([0, 1, 1, 2, 3])))
        reductions = list(REDUCTIONS)
        known = reductions.index("sum")
        reduction = r.choice(reductions if r.random() < 0.25 else reductions[:known])
        return Term(r.choice(list(SOURCES)[: None if r.random() < 0.2 else -1]), operations, reduction,
                    r.choice([1.0, 0.1, -0.5]))  # fmt: skip

    terms = tuple(term() for _ in range(r.choice([1, 1, 2, 2, 3])))
    aux = tuple(term() for _ in range(r.choice([0, 0, 0, 1, 2])))
    how = "mean" if r.random() < 0.1 else "scalar"
    return Recipe(terms, aux, how, r.choice(PLANS))


def reference(recipe: Recipe, params, batch):
    """Loss, gradients and aux of the undivided batch, in plain JAX."""

    def loss(params, batch):
        out = recipe.loss(Net().bind({"params": params}), batch)
        value, aux = out if recipe.aux else (out, {})
        if isinstance(value, cjax.Mean):
            value = value.total / value.weight
        return value, aux

    (value, aux), grads = jax.value_and_grad(loss, has_aux=True)(params, batch)
    return value, jax.tree.leaves(grads), [aux[str(i)] for i in range(len(recipe.aux))]


_STATES: dict[str, tuple] = {}  # by plan: all losses are of one model


def under(recipe: Recipe, batch):
    """The same under the recipe's plan, and the parameters it was at."""
    devices = jax.devices()[: 2 if "data=2" in recipe.plan else 1]
    program = cjax.parallelize(Net(), recipe.loss, optax.sgd(0.1), batch, recipe.plan, devices=devices)
    if recipe.plan not in _STATES:
        state = program.init(0)
        _STATES[recipe.plan] = state, jax.tree.map(np.asarray, program.params(state))
    state, params = _STATES[recipe.plan]
    graded, given = program._composed.gradients, (state._params, state._frozen, state._model_state)
    found = jax.jit(lambda *given: graded(*given, None))(*given, jax.tree.map(jnp.asarray, batch), state._key)
    loss, *aux = (t if w is None else t / w for t, w in [(found.out.total, found.out.weight), *found.out.aux])
    return loss, list(found.grads), aux, params


def verdict(recipe: Recipe, batch, reasons: list | None = None) -> str:
    """equal, refused, or what differs; `reasons` collects those for refusing."""
    try:
        loss, grads, aux, params = under(recipe, batch)
    except ValueError as error:
        expected = ("se microbatches=1", "loss=microbatch", "Use fewer micro-batches", "adds means to ratios")
        if reasons is not None:
            reasons.append(str(error))
        return "refused" if any(words in str(error) for words in expected) else f"error: {error}"
    true_loss, true_grads, true_aux = reference(recipe, params, batch)
    pairs = [("loss", loss, true_loss), *(("aux", a, b) for a, b in zip(aux, true_aux, strict=True))]
    pairs += [("gradient", a, b) for a, b in zip(grads, true_grads, strict=True)]
    scale = max(float(np.linalg.norm(g)) for g in true_grads)
    for what, a, b in pairs:
        size = scale if what == "gradient" else 1.0
        error = float(np.max(np.abs(np.asarray(a) - np.asarray(b)), initial=0))
        if not error <= TOLERANCE * max(1.0, size, float(np.max(np.abs(np.asarray(b)), initial=0))):
            return f"{what} differs by {error:.3g}"
    return "equal"


def smaller(recipe: Recipe, batch) -> Recipe:
    """A smaller recipe that still fails."""
    while True:
        tries = [replace(recipe, aux=recipe.aux[:i] + recipe.aux[i + 1 :]) for i in range(len(recipe.aux))]
        if len(recipe.terms) > 1:
            tries += [replace(recipe, terms=recipe.terms[:i] + recipe.terms[i + 1 :]) for i in range(len(recipe.terms))]
        for kind in ("terms", "aux"):
            for i, term in enumerate(getattr(recipe, kind)):
                for k in range(len(term.operations)):
                    less = replace(term, operations=term.operations[:k] + term.operations[k + 1 :])
                    terms = getattr(recipe, kind)
                    tries.append(replace(recipe, **{kind: (*terms[:i], less, *terms[i + 1 :])}))
        found = next((less for less in tries if not is_fine(verdict(less, batch))), None)
        if found is None:
            return recipe
        recipe = found


def is_fine(outcome: str) -> bool:
    return outcome in ("equal", "refused")


def search(count: int, seed: int, shrinks: bool = True, report=None) -> tuple[collections.Counter, list]:
    """Outcomes by kind, and the recipes that failed, made smaller, with what differs."""
    r, counts, failed, batch = random.Random(seed), collections.Counter(), [], make_batch(seed)
    for i in range(count):
        recipe = draw(r)
        try:
            outcome = verdict(recipe, batch)
        except Exception as error:  # a crash is a finding, not the end of the search
            outcome = f"crash: {type(error).__name__}: {str(error)[:300]}"
            failed.append((recipe, outcome))
            counts["crash"] += 1
            print(outcome, recipe, flush=True)
            continue
        counts[outcome.split(" ")[0]] += 1
        if not is_fine(outcome):
            failed.append((smaller(recipe, batch) if shrinks else recipe, outcome))
            print(outcome, failed[-1][0], flush=True)
        if report and i % report == report - 1:
            print(i + 1, dict(counts), flush=True)
        if i % 200 == 199:
            jax.clear_caches()
            _STATES.clear()
    return counts, failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    cjax.simulate(2)
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_disable_most_optimizations", True)
    counts, failed = search(given.count, given.seed, report=100)
    print(f"jax {jax.__version__} seed {given.seed} count {given.count}: {dict(counts)}, {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
