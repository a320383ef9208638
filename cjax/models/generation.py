"""Continuing texts with a trained decoder."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import core

from cjax.models.gpt import GPT
from cjax.models.llama import Llama
from cjax.models.past import Past
from cjax.models.t5 import T5, KeyValues

Decoder = GPT | Llama | T5


@dataclasses.dataclass(frozen=True)
class TokenChoice:
    """How a token is chosen, and when a text ends."""

    temperature: float
    top_k: int | None
    top_p: float | None
    stop: tuple[int, ...]

    @classmethod
    def of(
        cls,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        stop: Sequence[int] = (),
    ) -> "TokenChoice":
        """From a user's options."""
        return cls(float(temperature), top_k, None if top_p is None else float(top_p), tuple(map(int, stop)))


def generate(
    model: Decoder,
    tokens: jax.Array,
    num_tokens: int,
    key: jax.Array | None = None,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: Sequence[int] = (),
    present: jax.Array | None = None,
    precision: str = "float32",
) -> jax.Array:
    """Continues each row of `tokens`, or answers it if the model is a T5; compiles once per shape.

    Keys and values are computed once for each token, up to the model's context. Beyond it the window slides, and each
    token costs a pass over the whole of it.

    Args:
        model: a trained GPT, Llama or T5; used in eval mode, and left as it was.
        tokens: int[batch, length], length at least 1 and at most the context. A T5's encoder reads them.
        num_tokens: how many to add to each row.
        key: randomness for the samples; not needed at temperature 0.
        temperature: below 1 is bolder; 0 always takes the likeliest token.
        top_k: sample among the k likeliest only.
        top_p: sample among the likeliest only, as few as have this probability together.
        stop: tokens that end a text; the rest of its row repeats the one that did.
        present: for a T5, [batch, length], 0 or False for padding.
        precision: "bfloat16" rounds the model's matrices, once a call, and multiplies in it; keys and values are kept
            in it too. A token then reads half as many bytes, which is what takes time. Where two tokens are about as
            likely, the text may be another one.

    Returns:
        int32[batch, length + num_tokens], the given tokens first; of a T5 int32[batch, 1 + num_tokens], 0 first.

    Raises:
        ValueError: tokens or options that make no sense for this model.

    >>> from cjax.models import gpt
    >>> model = GPT(gpt("gpt-mini", num_layers=1), rngs=nnx.Rngs(0))
    >>> generate(model, jnp.zeros([2, 3], jnp.int32), 5, jax.random.key(0)).shape
    (2, 8)
    """
    prompt = read_prompt(tokens, model.config.vocab_size)
    check_num_tokens(num_tokens)
    choice = TokenChoice.of(temperature, top_k, top_p, stop)
    check_choice(model, prompt, key, choice, present)
    if precision not in ("float32", "bfloat16"):
        raise ValueError(f"generate got precision={precision!r}; write 'bfloat16', or 'float32' as by default")
    graph, state = nnx.split(model)
    key = jax.random.key(0) if key is None else key
    # Copies: an array of NumPy may be its owner's next prompt while this one's texts are still being made.
    prompt, present = jnp.array(prompt, jnp.int32), None if present is None else jnp.array(present)
    return _generate(graph, state, prompt, present, key, int(num_tokens), choice, precision == "bfloat16")


def read_prompt(tokens: Any, vocab_size: int) -> jax.Array | np.ndarray:
    """`tokens` as an array.

    Raises:
        ValueError: not rows of whole numbers, or one outside the vocabulary.
    """
    array = tokens if hasattr(tokens, "dtype") else np.asarray(tokens)
    if array.dtype.kind not in "iu" or array.ndim != 2 or 0 in array.shape:
        raise ValueError(
            f"generate needs tokens as integers of shape [batch, length >= 1], not {array.dtype}{list(array.shape)}. "
            "A text goes through the tokenizer of the model first: np.array([tokenizer.encode(text)])."
        )
    if isinstance(array, jax.Array) and (isinstance(array, core.Tracer) or not array.is_fully_addressable):
        return array
    held = np.asarray(jax.device_get(array))
    outside = (held < 0) | (held >= vocab_size)
    if outside.any():
        where = tuple(int(n) for n in np.argwhere(outside)[0])
        raise ValueError(
            f"the prompt holds {int(held[where])} at {list(where)}, outside this model's vocabulary of {vocab_size}, "
            f"whose tokens are 0 to {vocab_size - 1}: take the tokenizer that the model was trained with."
        )
    return array


def check_num_tokens(num_tokens: Any) -> None:
    """Raises ValueError unless this is a number of tokens to add."""
    if isinstance(num_tokens, bool) or not isinstance(num_tokens, int | np.integer) or num_tokens < 0:
        raise ValueError(f"generate got num_tokens={num_tokens!r}; it adds a whole number of tokens, such as 20")


# -- a pass over new tokens, for those who keep each layer's memory themselves ---------------------------------------
Memory = list[tuple[jax.Array, ...]]  # of each layer: keys and values, and of a T5 those of the encoder's text


def next_logits(model: Decoder, given: Mapping[str, jax.Array], memory: Memory) -> tuple[jax.Array, Memory]:
    """Logits [batch, vocab] of the token after the new ones, and the memory with these.

    Args:
        model: in eval mode.
        given: `new` tokens [batch, new length] and the `length` of what came before; of a T5 also `present`, if there
            is padding, and before the first token `source`, the text for the encoder.
        memory: what `empty_memory` gave, or the pass before.
    """
    pasts = [Past(keys, values, given["length"]) for keys, values, *_ in memory]
    if not isinstance(model, T5):
        hidden, others = model.hidden(given["new"], pasts), [()] * len(memory)
    else:
        present, others = given.get("present"), []
        if "source" in given:
            source = model.remember_each(model.encode(given["source"], present))
        else:
            source = ((layer[2], layer[3]) for layer in memory)

        def each() -> Iterator[KeyValues]:
            for keys_values in source:
                others.append(keys_values)
                yield keys_values

        hidden = model.decode(given["new"], each(), present, pasts)
    return last_logits(model, hidden), [(p.keys, p.values, *other) for p, other in zip(pasts, others, strict=True)]


def empty_memory(model: Decoder, batch: int, room: int, source_length: int) -> Memory:
    """What layers remember before the first pass: zeros, with room for so many tokens."""
    memory: Memory = [(past.keys, past.values) for past in model.make_past(batch, room)]
    if not isinstance(model, T5):
        return memory
    source = jnp.zeros([batch, source_length, model.config.num_heads, model.config.head_dim], memory[0][0].dtype)
    return [(*own, source, source) for own in memory]


def last_logits(model: Decoder, hidden: jax.Array) -> jax.Array:
    """Of the last position, [batch, vocab]."""
    return model.classify(hidden[:, -1:])[:, 0].astype(jnp.float32)


def check_choice(
    model: Decoder, tokens: Any, key: jax.Array | None, choice: TokenChoice, present: jax.Array | None
) -> None:
    if not isinstance(model, T5):
        if tokens.shape[1] > model.config.context:
            raise ValueError(
                f"the prompt of {tokens.shape[1]} tokens is longer than this model's context of "
                f"{model.config.context}; give its end: tokens[:, -{model.config.context}:]"
            )
        if present is not None:
            raise ValueError("generate takes `present` for a T5 only; give other models prompts of one length")
    if not 0 <= choice.temperature < math.inf or (
        choice.top_k is not None and not 1 <= choice.top_k <= model.config.vocab_size
    ):
        raise ValueError(
            f"generate got temperature={choice.temperature}, top_k={choice.top_k}; "
            f"it needs a finite temperature >= 0 and 1 <= top_k <= {model.config.vocab_size}"
        )
    if choice.top_p is not None and not 0 < choice.top_p <= 1:
        raise ValueError(f"generate got top_p={choice.top_p}; it is a probability above 0, such as top_p=0.9")
    if outside := [token for token in choice.stop if not 0 <= token < model.config.vocab_size]:
        raise ValueError(
            f"generate got stop={list(choice.stop)}, and {outside[0]} is no token: the vocabulary's are 0 to "
            f"{model.config.vocab_size - 1}"
        )
    if present is not None and jnp.shape(present) != tokens.shape:
        raise ValueError(
            f"`present` is of shape {list(jnp.shape(present))}; it says of each token whether it counts: "
            f"{list(tokens.shape)}"
        )
    if choice.temperature > 0 and key is None:
        raise ValueError("generate samples at random: give it key=jax.random.key(0), or temperature=0")


def rounded(model: Decoder) -> Decoder:
    """A copy with matrices in bfloat16, whose layers compute in it. The scores of tokens are float32's: in 8 bits many
    tokens would be equally likely, and the first of them said."""
    low = jnp.dtype(jnp.bfloat16)

    def matrix(x: jax.Array) -> jax.Array:
        return x.astype(low) if x.ndim > 1 and jnp.issubdtype(x.dtype, jnp.floating) else x

    graph, state = nnx.split(model)
    copy = nnx.merge(graph, jax.tree.map(matrix, state))
    layers: list[Any] = [module for _, module in nnx.iter_modules(copy)]
    for layer in layers:
        if hasattr(layer, "dtype"):  # in which Flax's layers compute
            layer.dtype = low
    if hasattr(copy, "head"):
        copy.head.preferred_element_type = jnp.float32
    return copy


@functools.partial(jax.jit, static_argnums=(0, 5, 6, 7))
def _generate(
    graph: nnx.GraphDef[Decoder],
    state: nnx.State[Any, Any],
    tokens: jax.Array,
    present: jax.Array | None,
    key: jax.Array,
    num_tokens: int,
    choice: TokenChoice,
    is_rounded: bool,
) -> jax.Array:
    model = nnx.merge(graph, state)
    if is_rounded:
        model = rounded(model)
    model.eval()
    batch = tokens.shape[0]
    if isinstance(model, T5):
        source, start = model.remember(model.encode(tokens, present)), jnp.zeros([batch, 1], jnp.int32)
        context = num_tokens + 1  # relative positions have no end

        def run(new: jax.Array, past: list[Past] | None) -> jax.Array:
            return model.decode(new, source, present, past)
    else:
        start, context = tokens, model.config.context

        def run(new: jax.Array, past: list[Past] | None) -> jax.Array:
            return model.hidden(new, past)

    def choose(hidden: jax.Array, position: jax.Array | int, done: jax.Array, before: jax.Array) -> jax.Array:
        return jnp.where(done, before, sample(last_logits(model, hidden), jax.random.fold_in(key, position), choice))

    return _continue(run, choose, start, num_tokens, context, model.make_past, choice.stop)


def _continue(
    run: Callable[[jax.Array, list[Past] | None], jax.Array],
    choose: Callable[..., jax.Array],
    start: jax.Array,
    num_tokens: int,
    context: int,
    make_past: Callable[[int, int], list[Past]],
    stop: tuple[int, ...],
) -> jax.Array:
    """`start` with tokens added: from `run`, which gives hidden states, and `choose`, which picks by them."""
    batch, length = start.shape
    end = length + num_tokens
    cached_end = min(end, context + 1)  # the last token of the context still chooses one without leaving the memory
    text = jnp.pad(start, ((0, 0), (0, num_tokens)))
    done = jnp.zeros([batch], bool)
    if num_tokens == 0:
        return text

    def write(
        text: jax.Array, position: jax.Array | int, hidden: jax.Array, done: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        before = jax.lax.dynamic_index_in_dim(text, position - 1, axis=1, keepdims=False)
        token = choose(hidden, position, done, before)
        done = done | jnp.isin(token, jnp.asarray(stop, jnp.int32))
        return jax.lax.dynamic_update_index_in_dim(text, token, position, axis=1), done

    def next_cached(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        position, text, done, past = carry
        newest = jax.lax.dynamic_slice_in_dim(text, position - 1, 1, axis=1)
        text, done = write(text, position, run(newest, past), done)
        return position + 1, text, done, past

    def next_sliding(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        position, text, done = carry
        window = jax.lax.dynamic_slice_in_dim(text, position - context, context, axis=1)
        text, done = write(text, position, run(window, None), done)
        return position + 1, text, done

    past = make_past(batch, min(end, context))
    text, done = write(text, length, run(start, past), done)
    position, text, done, _ = jax.lax.while_loop(
        lambda carry: (carry[0] < cached_end) & ~carry[2].all(), next_cached, (length + 1, text, done, past)
    )
    if end > cached_end:
        position, text, done = jax.lax.while_loop(
            lambda carry: (carry[0] < end) & ~carry[2].all(), next_sliding, (position, text, done)
        )
    # All rows may have ended early: their last tokens fill what is left.
    last = jax.lax.dynamic_slice_in_dim(text, position - 1, 1, axis=1)
    return jnp.where(jnp.arange(end) < position, text, last)


def sample(logits: jax.Array, key: jax.Array, choice: TokenChoice) -> jax.Array:
    """A token for each row of logits."""
    if choice.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = logits / choice.temperature
    if choice.top_k is not None:
        smallest_kept = jax.lax.top_k(logits, choice.top_k)[0][:, -1:]
        logits = jnp.where(logits < smallest_kept, -jnp.inf, logits)
    if choice.top_p is not None:
        ordered = jnp.sort(logits, axis=-1, descending=True)
        probabilities = jax.nn.softmax(ordered)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities  # together, of all that are likelier
        smallest_kept = jnp.min(jnp.where(before < choice.top_p, ordered, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits < smallest_kept, -jnp.inf, logits)
    return jax.random.categorical(key, logits, axis=-1).astype(jnp.int32)
