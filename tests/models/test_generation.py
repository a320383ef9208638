import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params
from models import by_hand as hand

from cjax.models import GPT, T5, Llama, generate
from cjax.models.generation import TokenChoice, _generate, rounded
from cjax.models.gpt import GPTConfig
from cjax.models.llama import LlamaConfig
from cjax.models.t5 import T5Config

VOCAB, CONTEXT = 29, 16
MODELS = {
    "gpt": lambda: GPT(GPTConfig(2, 3, 12, 20, CONTEXT, VOCAB), rngs=nnx.Rngs(0)),
    "llama": lambda: Llama(
        LlamaConfig(2, 4, 2, 16, 20, context=CONTEXT, vocab_size=VOCAB, rope_factor=4.0), rngs=nnx.Rngs(0)
    ),
    "t5": lambda: T5(T5Config(2, 2, 3, 4, 12, 20, VOCAB, num_buckets=8, max_distance=9), rngs=nnx.Rngs(0)),
}


def make(name: str) -> GPT | Llama | T5:
    return hand.generic(MODELS[name])


def make_tokens(length: int, batch: int = 3) -> np.ndarray:
    return np.random.default_rng(7).integers(0, VOCAB, (batch, length))


def by_whole_passes(model, tokens: np.ndarray, num_tokens: int, present=None) -> np.ndarray:
    """Greedy, without any memory."""
    text = np.zeros([len(tokens), 1], int) if isinstance(model, T5) else tokens
    whole = jax.jit(lambda text: model(jnp.asarray(tokens), text, present) if isinstance(model, T5) else model(text))
    for _ in range(num_tokens):
        window = text[:, -CONTEXT:]
        later = CONTEXT - window.shape[1]  # one shape, so that it compiles once; nobody looks at what comes later
        logits = whole(np.pad(window, ((0, 0), (0, later))))[:, window.shape[1] - 1]
        text = np.concatenate([text, np.argmax(logits, -1)[:, None]], axis=1)
    return text


@pytest.mark.full("llama", "t5")
@pytest.mark.parametrize("name", MODELS)
def test_greedy_texts_equal_whole_passes(name: str):
    model, tokens = make(name), make_tokens(5)
    made = generate(model, jnp.asarray(tokens), 9, temperature=0)
    expected = by_whole_passes(model, tokens, 9)
    assert len(np.unique(expected)) > 4
    np.testing.assert_array_equal(made, expected)


def test_a_text_longer_than_the_context_goes_on():
    model, tokens = make("llama"), make_tokens(14)
    np.testing.assert_array_equal(
        generate(model, jnp.asarray(tokens), 5, temperature=0), by_whole_passes(model, tokens, 5)
    )


@pytest.mark.full
def test_padding_of_what_t5_reads_makes_no_difference():
    model, tokens = make("t5"), make_tokens(6)
    present = np.arange(6) < np.array([4, 6, 5])[:, None]
    other = np.where(present, tokens, 1)
    made = generate(model, jnp.asarray(tokens), 6, temperature=0, present=jnp.asarray(present))
    np.testing.assert_array_equal(
        made, generate(model, jnp.asarray(other), 6, temperature=0, present=jnp.asarray(present))
    )
    np.testing.assert_array_equal(made, by_whole_passes(model, tokens, 6, jnp.asarray(present)))


def test_a_row_ends_at_a_stop_token_and_repeats_it():
    """Rows end at different places: one that has ended waits for the others, and says nothing new meanwhile."""
    model, tokens = make("llama"), make_tokens(5)
    free = np.asarray(generate(model, jnp.asarray(tokens), 9, temperature=0))
    stop = [int(free[0, 6]), int(free[1, 9])]
    made = np.asarray(generate(model, jnp.asarray(tokens), 9, temperature=0, stop=stop))
    ends = [next((t for t in range(5, 14) if wanted[t] in stop), 13) for wanted in free]
    for row, wanted, end in zip(made, free, ends, strict=True):
        np.testing.assert_array_equal(row[: end + 1], wanted[: end + 1])
        assert (row[end:] == row[end]).all()
    first, last = min(ends), max(ends)
    assert (free[np.argmin(ends), first : last + 1] != free[np.argmin(ends), first]).any(), "it would go on otherwise"
    alone = generate(model, jnp.asarray(tokens[:1]), 9, temperature=0, stop=stop)  # the loop ends early
    np.testing.assert_array_equal(alone, made[:1])


@pytest.mark.full
def test_samples_have_the_probabilities_of_the_model():
    """4,000 samples of one token, beside the softmax of the logits over what top_k and top_p keep."""
    model, prompt = make("gpt"), make_tokens(3, batch=1)
    tokens = jnp.asarray(np.repeat(prompt, 4000, axis=0))
    logits = np.asarray(model(jnp.asarray(prompt)))[0, -1].astype(np.float64) / 2
    likely = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    order = np.argsort(-likely)
    for options, kept in (
        ({}, order),
        ({"top_k": 3}, order[:3]),
        ({"top_p": 0.6}, order[: 1 + np.searchsorted(np.cumsum(likely[order]), 0.6)]),
    ):
        wanted = np.zeros(VOCAB)
        wanted[kept] = likely[kept] / likely[kept].sum()
        made = np.asarray(generate(model, tokens, 1, jax.random.key(0), temperature=2.0, **options))[:, -1]
        found = np.bincount(made, minlength=VOCAB) / len(made)
        assert (found[wanted == 0] == 0).all()
        assert np.abs(found - wanted).max() < 0.04, options


@pytest.mark.full("t5")
@pytest.mark.parametrize("name", MODELS)
def test_texts_in_16_bits_say_what_is_about_as_likely(name: str):
    """Each token's score, by the model in float32 and of the text so far, is the highest but for what rounding does."""
    model, tokens = make(name), make_tokens(5)
    text = np.asarray(generate(model, jnp.asarray(tokens), 9, temperature=0, precision="bfloat16"))
    given = (jnp.asarray(tokens), jnp.asarray(text)) if isinstance(model, T5) else (jnp.asarray(text),)
    scores = [one(*given) for one in (model, rounded(model))]
    assert {x.dtype.name for x in scores} == {"float32"}, "in 16 bits many tokens would be equally likely"
    exact, low = (np.asarray(x)[:, -10:-1] for x in scores)
    spread = exact.std()
    wrong = np.abs(exact - low).max()
    assert 0 < wrong < 0.15 * spread, "rounded, and no further off than that"
    said = np.take_along_axis(exact, text[:, -9:, None], axis=-1)[..., 0]
    assert (said >= exact.max(-1) - 2 * wrong).all()


@pytest.mark.parametrize("name", MODELS)
def test_texts_in_16_bits_read_half_the_bytes(name: str):
    """Every product of a token is of 16 bits, and so are the keys and values."""
    graph, state = nnx.split(make(name))
    choice = TokenChoice.of(temperature=0)
    tokens = jnp.asarray(make_tokens(5), jnp.int32)
    traced = jax.make_jaxpr(lambda state: _generate(graph, state, tokens, None, jax.random.key(0), 3, choice, True))
    call = traced(state).eqns[-1]
    (loop,) = [eqn for eqn in call.params["jaxpr"].eqns if eqn.primitive.name == "while"]
    carried = [v.aval for v in loop.invars if v.aval.ndim == 4]
    assert carried and {x.dtype.name for x in carried} == {"bfloat16"}

    def products(jaxpr) -> list[str]:
        found = []
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "dot_general":
                found.append("/".join(sorted(v.aval.dtype.name for v in eqn.invars)))
            for inner in jaxprs_in_params(eqn.params):
                found += products(inner)
        return found

    found = products(loop.params["body_jaxpr"].jaxpr)
    assert len(found) > 8 and set(found) == {"bfloat16/bfloat16"}


@pytest.mark.parametrize("name", MODELS)
def test_no_tokens_are_no_change(name: str):
    tokens = jnp.asarray(make_tokens(4))
    start = jnp.zeros([3, 1], int) if name == "t5" else tokens
    np.testing.assert_array_equal(generate(make(name), tokens, 0, temperature=0), start)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"tokens": np.zeros([1, CONTEXT + 1], int)}, r"context of 16; give its end: tokens\[:, -16:\]"),
        ({"tokens": np.zeros([4], int)}, "length >= 1"),
        ({"temperature": -1}, "temperature >= 0"),
        ({"top_k": 0, "key": jax.random.key(0)}, "top_k"),
        ({"top_p": 0.0, "key": jax.random.key(0)}, "top_p=0.9"),
        ({}, r"key=jax.random.key\(0\)"),
        ({"temperature": 0, "present": np.ones([1, 2])}, "T5 only"),
        ({"temperature": 0, "precision": "bf16"}, "precision='bf16'; write 'bfloat16', or 'float32'"),
    ],
)
def test_bad_options_say_what_to_write(options: dict, message: str):
    tokens = jnp.asarray(options.pop("tokens", np.zeros([1, 2], int)))
    with pytest.raises(ValueError, match=message):
        generate(make("gpt"), tokens, 3, **options)
