"""`cjax.generate`: texts continued by a trained decoder, on one device or where a program keeps it."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from cjax.mesh import BATCH_AXES, own_context
from cjax.models.generation import Decoder, read_prompt
from cjax.models.generation import generate as continued
from cjax.program import Program, State


@own_context
def generate(
    source: Program | Decoder,
    tokens: Any,
    num_tokens: int,
    key: jax.Array | None = None,
    *,
    state: State | None = None,
    **options: Any,
) -> jax.Array:
    """Continues each row of `tokens`; greedy texts are the same tokens under every plan.

    Args:
        source: a trained GPT, Llama or T5, or a program of one.
        tokens: int[batch, length]; with a program whose batch is split, a number of rows that its devices divide.
        num_tokens: how many to add to each row.
        key: randomness for the samples; not needed at temperature 0.
        state: of the program.
        options: temperature, top_k, top_p, stop, present; as `cjax.models.generate` has them.

    Returns:
        int32[batch, length + num_tokens], the given tokens first; of a T5 int32[batch, 1 + num_tokens], 0 first.

    Raises:
        ValueError: a program without its state, or under a plan with a grid, a pipeline or split positions; rows that
            don't divide; and what `cjax.models.generate` refuses.
        TypeError: something that is neither.

    >>> import cjax
    >>> from cjax.models import GPT, gpt, loss
    >>> shape = jax.ShapeDtypeStruct((8, 16), jnp.int32)
    >>> program = cjax.parallelize(
    ...     lambda rngs: GPT(gpt("gpt-mini"), rngs=rngs), loss, None, {"inputs": shape, "targets": shape}, plan="zero=3"
    ... )
    >>> prompt = jnp.zeros([program.mesh.size, 3], jnp.int32)
    >>> generate(program, prompt, 5, temperature=0, state=program.init(0)).shape[1]
    8
    """
    if not isinstance(source, Program):
        if state is not None:
            raise ValueError(f"`state` goes with a program, and this is a {type(source).__name__}: leave it out")
        if not isinstance(source, Decoder):
            raise TypeError(
                f"generate got a {type(source).__name__}; it continues texts with a GPT, Llama or T5 of cjax.models, "
                "or a program of one: generate(program, tokens, num_tokens, state=state)"
            )
        return continued(source, tokens, num_tokens, key, **options)
    if state is None:
        raise ValueError("a program's parameters are in its state: write generate(program, ..., state=state)")
    plan = source.plan
    if plan.pipeline.size > 1 or plan.tensor.mode != "1d" or plan.sequence.size > 1:
        raise ValueError(
            f"texts are generated under data and 1d tensor parallelism, with any zero, and the plan is {str(plan)!r}. "
            f'Write other = program.replan("tensor={source.mesh.size}"), and '
            "generate(other, ..., state=other.restore(state))"
        )
    model = source.model(state)
    if not isinstance(model, Decoder):
        kind = type(model).__name__
        raise TypeError(f"generate continues texts with a GPT, Llama or T5, and this program trains a {kind}")
    tokens = read_prompt(tokens, model.config.vocab_size)
    axes = tuple(axis for axis in BATCH_AXES if source.mesh.shape.get(axis, 1) > 1)
    rows, parts = len(tokens), source.mesh.size // plan.tensor.size
    if rows % parts:
        raise ValueError(
            f"{rows} rows of tokens don't divide over the {parts} devices that share a batch under {str(plan)!r}; give "
            f"{rows // parts * parts or parts} or {(rows // parts + 1) * parts} rows"
        )
    split = NamedSharding(source.mesh, PartitionSpec(axes or None))
    if options.get("present") is not None:
        options["present"] = jax.device_put(jnp.asarray(options["present"]), split)
    return continued(model, jax.device_put(jnp.asarray(tokens, jnp.int32), split), num_tokens, key, **options)
