"""`cjax.generate`: texts continued by a trained decoder, on one device or where a program keeps it."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from cjax.mesh import BATCH_AXES, own_context
from cjax.models import T5
from cjax.models.generation import (
    Decoder,
    TokenChoice,
    check_choice,
    check_num_tokens,
    empty_memory,
    next_logits,
    read_prompt,
    sample,
)
from cjax.models.generation import generate as continued
from cjax.planner.homes import Home
from cjax.program import Program, State
from cjax.program.program import texts_of
from cjax.program.texts import Needs, Texts, Weights
from cjax.program.walked import WalkedState
from cjax.streamed import StreamedModel
from cjax.tree import kind_of

Ready = Callable[[Needs], tuple[Weights, Sequence[Home]]]  # weights where passes read them, and the homes of memory


@own_context
def generate(
    source: Program | Decoder | StreamedModel,
    tokens: Any,
    num_tokens: int,
    key: jax.Array | None = None,
    *,
    state: State | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: Sequence[int] = (),
    present: Any = None,
    precision: str = "float32",
) -> jax.Array:
    """Continues each row of `tokens`; greedy texts are the same tokens under every plan.

    Under `budget=` and `offload=` each token is a pass over the layers, whose weights are fetched once for all rows:
    many rows cost little more than one. What layers remember of earlier tokens is in host memory with
    `offload=activations`, or where the budget has no room for it.

    Args:
        source: a trained GPT, Llama or T5, a program of one, or a `StreamedModel` of a folder.
        tokens: int[batch, length]; with a program whose batch is split, a number of rows that its devices divide.
        num_tokens: how many to add to each row.
        key: randomness for the samples; not needed at temperature 0.
        state: of the program.
        temperature: below 1 is bolder; 0 always takes the likeliest token.
        top_k: sample among the k likeliest only.
        top_p: sample among the likeliest only, as few as have this probability together.
        stop: tokens that end a text; the rest of its row repeats the one that did.
        present: for a T5, [batch, length], 0 or False for padding.
        precision: "bfloat16" where the whole model is on devices, as `cjax.models.generate` has it.

    Returns:
        int32[batch, length + num_tokens], the given tokens first; of a T5 int32[batch, 1 + num_tokens], 0 first.

    Raises:
        ValueError: a program without its state, or under a plan with a grid, a pipeline or split positions; rows that
            don't divide; and what `cjax.models.generate` refuses.
        TypeError: something that is neither.

    >>> import cjax
    >>> from cjax.models import GPT, gpt, loss
    >>> shape = jax.ShapeDtypeStruct((8, 16), jnp.int32)
    >>> config, batch = gpt("gpt-mini", num_layers=1), {"inputs": shape, "targets": shape}
    >>> program = cjax.parallelize(lambda rngs: GPT(config, rngs=rngs), loss, None, batch, plan="zero=3")
    >>> prompt = jnp.zeros([program.mesh.size, 3], jnp.int32)
    >>> generate(program, prompt, 5, temperature=0, state=program.init(0)).shape[1]
    8
    """
    options: dict[str, Any] = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "stop": stop,
        "present": present,
        "precision": precision,
    }
    if not isinstance(source, Program):
        if state is not None:
            raise ValueError(f"`state` goes with a program, and this is {kind_of(source)}: leave it out")
        if isinstance(source, StreamedModel):
            texts = source.texts
            walked = _Walked(texts, texts.model(), source.ready)
            return _shared(source, texts.model(), walked, tokens, num_tokens, key, options)
        if not isinstance(source, Decoder):
            raise TypeError(
                f"generate got {kind_of(source)}; it continues texts with a GPT, Llama or T5 of cjax.models, "
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
    texts = texts_of(source, state, next_logits)
    model = source.model(state) if texts is None else texts.model()
    if not isinstance(model, Decoder):
        kind = type(model).__name__
        raise TypeError(f"generate continues texts with a GPT, Llama or T5, and this program trains a {kind}")
    if texts is None:
        return _shared(source, model, functools.partial(continued, model), tokens, num_tokens, key, options)
    assert isinstance(state, WalkedState)
    weights = Weights.of(state)
    walked = _Walked(texts, model, lambda needs: (weights, texts.homes(weights.held.homes, needs)))
    return _shared(source, model, walked, tokens, num_tokens, key, options)


def _shared(
    source: Program | StreamedModel, model: Decoder, run: Callable[..., jax.Array], tokens: Any, num_tokens: int,
    key: jax.Array | None, options: dict[str, Any],
) -> jax.Array:  # fmt: skip
    """Texts by `run`, of rows that devices share."""
    tokens, plan = read_prompt(tokens, model.config.vocab_size), source.plan
    axes = tuple(axis for axis in BATCH_AXES if source.mesh.shape.get(axis, 1) > 1)
    rows, parts = len(tokens), source.mesh.size // plan.tensor.size
    if rows % parts:
        raise ValueError(
            f"{rows} rows of tokens don't divide over the {parts} devices that share a batch under {str(plan)!r}; give "
            f"{rows // parts * parts or parts} or {(rows // parts + 1) * parts} rows"
        )
    split = NamedSharding(source.mesh, PartitionSpec(axes or None))
    if options.get("present") is not None:
        options["present"] = jax.device_put(jnp.array(options["present"]), split)
    tokens = jax.device_put(jnp.array(tokens, jnp.int32), split)
    return run(tokens, num_tokens, key, **options)


class _Walked:
    """Texts of a program that walks: each token is a pass over the layers, for all rows at once."""

    def __init__(self, texts: Texts, model: Decoder, ready: Ready) -> None:
        self._texts, self._model, self._ready = texts, model, ready

    def __call__(
        self,
        tokens: jax.Array,
        num_tokens: int,
        key: jax.Array | None,
        present: jax.Array | None = None,
        precision: str = "float32",
        **options: Any,
    ) -> jax.Array:
        check_num_tokens(num_tokens)
        if precision != "float32":
            raise ValueError(
                f"generate got precision={precision!r}, and layers that are fetched for each token compute in float32: "
                "leave precision out; or where the whole model fits on a device, give generate the model"
            )
        choice, model, texts = TokenChoice.of(**options), self._model, self._texts
        check_choice(model, tokens, key, choice, present)
        key = jax.random.key(0) if key is None else key
        is_t5, batch = isinstance(model, T5), len(tokens)
        start = jnp.zeros([batch, 1], jnp.int32) if is_t5 else tokens
        length = start.shape[1]
        end = length + num_tokens
        text, done = jnp.pad(start, ((0, 0), (0, num_tokens))), jnp.zeros([batch], bool)
        if num_tokens == 0:
            return text
        context = num_tokens + 1 if isinstance(model, T5) else model.config.context  # relative positions have no end
        memory = _memory_shape(model, batch, min(end, context), tokens.shape[1])
        given: dict[str, jax.Array] = {} if present is None else {"present": present}

        def pass_at(position: int) -> dict[str, Any]:
            # Behind the context the window slides: nothing that was remembered stands where it stood, and all of it is
            # made again.
            before = 0 if position == length or position > context else position - 1
            first = max(before, position - context)
            # Not text[:, first:position], which would be another program for each token.
            some = jax.lax.dynamic_slice_in_dim(text, np.int32(first), position - first, axis=1)
            source = {"source": tokens} if is_t5 and position == length else {}
            return texts.placed({"new": some, "length": np.int32(before), **given, **source})

        # The first pass, one with a token more, and one behind the context.
        kinds = [p for p in (length, length + 1, max(length, context) + 1) if p < end]
        passes = [jax.tree.map(_struct, pass_at(position)) for position in kinds]
        weights, homes = self._ready(texts.needs(passes, memory))
        rows, position = texts.memory(passes[0], memory, homes), length
        try:
            while position < end and not bool(done.all()):
                logits = texts(weights, pass_at(position), memory, rows)
                text, done = _write(text, done, logits, np.int32(position), key, choice)
                position += 1
        finally:
            rows.close()
        # All rows may have ended early: their last tokens fill what is left.
        return jnp.where(jnp.arange(end) < position, text, text[:, position - 1 : position])


def _memory_shape(model: Decoder, batch: int, room: int, source_length: int) -> Any:
    graph, state = nnx.split(model)
    return jax.eval_shape(lambda state: empty_memory(nnx.merge(graph, state), batch, room, source_length), state)


def _struct(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


@functools.partial(jax.jit, static_argnums=5)
def _write(
    text: jax.Array, done: jax.Array, logits: jax.Array, position: Any, key: jax.Array, choice: TokenChoice
) -> tuple[jax.Array, jax.Array]:
    """`text` with a token at this position, and which rows have ended."""
    before = jax.lax.dynamic_index_in_dim(text, position - 1, axis=1, keepdims=False)
    token = jnp.where(done, before, sample(logits, jax.random.fold_in(key, position), choice))
    done = done | jnp.isin(token, jnp.asarray(choice.stop, jnp.int32))
    return jax.lax.dynamic_update_index_in_dim(text, token, position, axis=1), done
