"""Kinds that no package brings, written anew: state spaces, recurrences, sound, graphs, fields, a player."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from strangers.common import CLASSES, LENGTH, ROWS, VOCAB, Stranger, cross_entropy, random, sentence_pairs, wide


def series(length: int = LENGTH, channels: int = 5) -> dict[str, np.ndarray]:
    rng = random()
    waves = rng.normal(size=(ROWS, length, channels)).astype("float32")
    return {"waves": waves, "labels": rng.integers(0, CLASSES, ROWS).astype("int32")}


def series_loss(model: Any, batch: Any) -> Any:
    return cross_entropy(model(batch["waves"]), batch["labels"])


# -- S4D: a diagonal state space as a long convolution (Gu et al., 2022) ----------------------------------------------
class DiagonalConvolution(nn.Module):
    states: int = 8

    @nn.compact
    def __call__(self, x: Any) -> Any:
        width, length = x.shape[-1], x.shape[-2]
        shape = (width, self.states)
        decay = self.param("decay", nn.initializers.constant(-0.7), shape)
        turn = self.param(
            "turn", lambda key, shape: jnp.pi * jnp.broadcast_to(jnp.arange(shape[1]), shape) * 1.0, shape
        )
        out = self.param("out", nn.initializers.normal(0.5), (2, *shape))
        pace = jnp.exp(self.param("pace", nn.initializers.constant(-2.0), (width, 1)))
        direct = self.param("direct", nn.initializers.ones, (width,))
        pole = -jnp.exp(decay) + 1j * turn
        gain = (out[0] + 1j * out[1]) * (jnp.exp(pole * pace) - 1) / pole
        powers = jnp.exp((pole * pace)[..., None] * jnp.arange(length))
        kernel = 2 * jnp.einsum("ws,wst->wt", gain, powers).real
        spectrum = jnp.fft.rfft(jnp.swapaxes(x, 1, 2), n=2 * length) * jnp.fft.rfft(kernel, n=2 * length)
        y = jnp.swapaxes(jnp.fft.irfft(spectrum, n=2 * length)[..., :length], 1, 2)
        return y + direct * x


class S4D(nn.Module):
    width: int = 16
    depth: int = 2

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.Dense(self.width)(x)
        for _ in range(self.depth):
            y = nn.gelu(DiagonalConvolution()(nn.LayerNorm()(x)))
            x = x + nn.glu(nn.Dense(2 * self.width)(y))
        return nn.Dense(CLASSES)(x.mean(1))


def s4d() -> Stranger:
    return Stranger(S4D(), series_loss, series())


# -- S5: one state space of many inputs, as a parallel scan (Smith et al., 2023). NNX ---------------------------------
class StateSpace(nnx.Module):
    def __init__(self, width: int, states: int, rngs: nnx.Rngs) -> None:
        key = rngs.params
        self.decay = nnx.Param(jnp.full((states,), -0.7))
        self.turn = nnx.Param(jnp.pi * jnp.arange(states) * 1.0)
        self.into = nnx.Param(jax.random.normal(key(), (states, width, 2)) / width**0.5)
        self.out = nnx.Param(jax.random.normal(key(), (width, states, 2)) / states**0.5)
        self.pace = nnx.Param(jnp.full((states,), -1.5))
        self.direct = nnx.Param(jax.random.normal(key(), (width,)))

    def __call__(self, x: Any) -> Any:
        pole = -jnp.exp(self.decay[...]) + 1j * self.turn[...]
        step = jnp.exp(pole * jnp.exp(self.pace[...]))
        into = ((step - 1) / pole)[:, None] * jax.lax.complex(self.into[..., 0], self.into[..., 1])
        fed = jnp.einsum("btw,sw->bts", x.astype(into.dtype), into)

        def join(left: Any, right: Any) -> Any:
            return left[0] * right[0], right[0] * left[1] + right[1]

        states = jax.lax.associative_scan(join, (jnp.broadcast_to(step, fed.shape), fed), axis=1)[1]
        out = jax.lax.complex(self.out[..., 0], self.out[..., 1])
        return jnp.einsum("bts,ws->btw", states, out).real + self.direct[...] * x


class S5(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, width: int = 16, states: int = 6, depth: int = 2) -> None:
        self.enter = nnx.Linear(5, width, rngs=rngs)
        self.norms = nnx.List(nnx.LayerNorm(width, rngs=rngs) for _ in range(depth))
        self.spaces = nnx.List(StateSpace(width, states, rngs) for _ in range(depth))
        self.gates = nnx.List(nnx.Linear(width, width, rngs=rngs) for _ in range(depth))
        self.leave = nnx.Linear(width, CLASSES, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = self.enter(x)
        for norm, space, gate in zip(self.norms, self.spaces, self.gates, strict=True):
            y = nnx.gelu(space(norm(x)))
            x = x + y * nnx.sigmoid(gate(y))
        return self.leave(x.mean(1))


def s5() -> Stranger:
    return Stranger(wide(S5(nnx.Rngs(0))), series_loss, series())


# -- sound: dilated convolutions in a stack with skips, and recurrent CTC ---------------------------------------------
class WaveNet(nn.Module):
    width: int = 16
    depth: int = 4

    @nn.compact
    def __call__(self, ids: Any) -> Any:
        x, skips = nn.Embed(32, self.width)(ids), 0.0
        for layer in range(self.depth):
            conv = nn.Conv(2 * self.width, (2,), kernel_dilation=2**layer, padding=[(2**layer, 0)])
            signal, gate = jnp.split(conv(x), 2, -1)
            y = jnp.tanh(signal) * nn.sigmoid(gate)
            skips = skips + nn.Dense(self.width)(y)
            x = x + nn.Dense(self.width)(y)
        return nn.Dense(32)(nn.relu(nn.Dense(self.width)(nn.relu(skips))))


def wavenet() -> Stranger:
    def loss(model: Any, batch: Any) -> Any:
        return cross_entropy(model(batch)[:, :-1], batch[:, 1:])

    return Stranger(WaveNet(), loss, random().integers(0, 32, (ROWS, 16)).astype("int32"))


class Listener(nnx.Module):
    """Two directions of GRUs, twice, over frames of sound."""

    def __init__(self, rngs: nnx.Rngs, width: int = 16) -> None:
        self.enter = nnx.Conv(5, width, (3,), strides=2, rngs=rngs)
        self.layers = nnx.List(
            nnx.Bidirectional(
                nnx.RNN(nnx.GRUCell(size, width, param_dtype=float, rngs=rngs)),
                nnx.RNN(nnx.GRUCell(size, width, param_dtype=float, rngs=rngs)),
            )
            for size in (width, 2 * width)
        )
        self.leave = nnx.Linear(2 * width, 10, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = nnx.relu(self.enter(x))
        for layer in self.layers:
            x = layer(x)
        return self.leave(x)


def gru_speech() -> Stranger:
    def loss(model: Any, batch: Any) -> Any:
        logits = model(batch["waves"])
        silent = jnp.zeros(logits.shape[:2], logits.dtype)
        return optax.ctc_loss(logits, silent, batch["letters"], batch["no letter"]).mean()

    rng, batch = random(), series(24)
    letters = {
        "letters": rng.integers(1, 10, (ROWS, 4)).astype("int32"),
        "no letter": (np.arange(4) >= rng.integers(2, 5, (ROWS, 1))).astype("float32"),
    }
    return Stranger(wide(Listener(nnx.Rngs(0))), loss, {"waves": batch["waves"], **letters})


# -- words: an LSTM reads, an LSTM writes -----------------------------------------------------------------------------
class Translator(nn.Module):
    width: int = 24

    @nn.compact
    def __call__(self, ids: Any, mask: Any, target: Any) -> Any:
        embed = nn.Embed(VOCAB, self.width)
        reader = nn.RNN(nn.OptimizedLSTMCell(self.width, param_dtype=float), return_carry=True)
        carry, states = reader(embed(ids), seq_lengths=mask.sum(-1))
        written = nn.RNN(nn.OptimizedLSTMCell(self.width, param_dtype=float))(embed(target), initial_carry=carry)
        scores = jnp.einsum("btw,bsw->bts", nn.Dense(self.width)(written), states)
        weights = nn.softmax(jnp.where(mask[:, None] > 0, scores, -1e9))
        seen = jnp.einsum("bts,bsw->btw", weights, states)
        return nn.Dense(VOCAB)(jnp.tanh(nn.Dense(self.width)(jnp.concatenate([written, seen], -1))))


def lstm_translator() -> Stranger:
    def loss(model: Any, batch: Any) -> Any:
        logits = model(batch["ids"], batch["mask"], batch["target"])
        return cross_entropy(logits, batch["labels"], batch["target_mask"])

    return Stranger(Translator(), loss, sentence_pairs())


# -- graphs: messages along edges, each row a graph of its own --------------------------------------------------------
class GraphNet(nn.Module):
    width: int = 16
    depth: int = 3

    @nn.compact
    def __call__(self, nodes: Any, edges: Any, ends: Any, there: Any) -> Any:
        x, e = nn.Dense(self.width)(nodes), nn.Dense(self.width)(edges)
        for _ in range(self.depth):
            pick = jax.vmap(lambda rows, index: rows[index])
            pair = jnp.concatenate([e, pick(x, ends[..., 0]), pick(x, ends[..., 1])], -1)
            message = nn.Dense(self.width)(nn.relu(nn.Dense(2 * self.width)(pair))) * there[..., None]
            gather = jax.vmap(lambda rows, index: jax.ops.segment_sum(rows, index, nodes.shape[1]))
            heard = gather(message, ends[..., 1])
            x = nn.LayerNorm()(x + nn.Dense(self.width)(jnp.concatenate([x, heard], -1)))
            e = e + message
        return nn.Dense(1)(x.sum(1))[..., 0]


def graph_net() -> Stranger:
    def loss(model: Any, batch: Any) -> Any:
        found = model(batch["nodes"], batch["edges"], batch["ends"], batch["there"])
        return optax.huber_loss(found, batch["energy"]).mean()

    rng = random()
    batch = {
        "nodes": rng.normal(size=(ROWS, 7, 4)).astype("float32"),
        "edges": rng.normal(size=(ROWS, 10, 3)).astype("float32"),
        "ends": rng.integers(0, 7, (ROWS, 10, 2)).astype("int32"),
        "there": (np.arange(10) < rng.integers(4, 11, (ROWS, 1))).astype("float32"),
        "energy": rng.normal(size=ROWS).astype("float32"),
    }
    return Stranger(GraphNet(), loss, batch)


# -- fields: Fourier's operator, and light along rays -----------------------------------------------------------------
class FourierOperator(nn.Module):
    """Li et al., 2021: a linear map of the lowest frequencies beside one of the points."""

    width: int = 8
    modes: int = 4
    depth: int = 2

    @nn.compact
    def __call__(self, x: Any) -> Any:
        length = x.shape[1]
        x = nn.Dense(self.width)(x)
        for layer in range(self.depth):
            shape = (2, self.modes, self.width, self.width)
            parts = self.param(f"spectral_{layer}", nn.initializers.normal(0.1), shape)
            low = jnp.fft.rfft(x, axis=1)[:, : self.modes]
            low = jnp.einsum("bmi,mio->bmo", low, parts[0] + 1j * parts[1])
            full = jnp.zeros((x.shape[0], length // 2 + 1, self.width), low.dtype).at[:, : self.modes].set(low)
            x = nn.gelu(jnp.fft.irfft(full, n=length, axis=1) + nn.Dense(self.width)(x))
        return nn.Dense(1)(x)


def fourier_operator() -> Stranger:
    def loss(model: Any, batch: Any) -> Any:
        """The error of each field, relative to its size."""
        off = jnp.linalg.norm(model(batch["now"]) - batch["later"], axis=(1, 2))
        return jnp.mean(off / jnp.linalg.norm(batch["later"], axis=(1, 2)))

    rng = random()
    now, later = rng.normal(size=(ROWS, 16, 2)), rng.normal(size=(ROWS, 16, 1))
    return Stranger(FourierOperator(), loss, {"now": now.astype("float32"), "later": later.astype("float32")})


class Radiance(nn.Module):
    """Colours and densities along a ray, what is behind hidden by what is in front (Mildenhall et al., 2020)."""

    width: int = 24

    @nn.compact
    def __call__(self, start: Any, way: Any, depths: Any) -> Any:
        points = start[:, None] + way[:, None] * depths[..., None]
        waves = points[..., None] * 2.0 ** jnp.arange(3)
        seen = jnp.concatenate([points, jnp.sin(waves).reshape(*points.shape[:2], -1)], -1)
        x = seen
        for layer in range(4):
            x = nn.relu(nn.Dense(self.width)(x if layer != 2 else jnp.concatenate([x, seen], -1)))
        density, colour = nn.softplus(nn.Dense(1)(x))[..., 0], nn.sigmoid(nn.Dense(3)(x))
        gaps = jnp.diff(depths, axis=-1, append=depths[:, -1:] + 1.0)
        opaque = 1 - jnp.exp(-density * gaps)
        clear = jnp.cumprod(1 - opaque + 1e-10, axis=-1)
        shares = opaque * jnp.concatenate([jnp.ones_like(clear[:, :1]), clear[:, :-1]], -1)
        return jnp.sum(shares[..., None] * colour, 1)


def radiance_field() -> Stranger:
    def loss(model: Any, batch: Any) -> Any:
        return jnp.mean((model(batch["start"], batch["way"], batch["depths"]) - batch["colour"]) ** 2)

    rng = random()
    batch = {
        "start": rng.normal(size=(ROWS, 3)).astype("float32"),
        "way": rng.normal(size=(ROWS, 3)).astype("float32"),
        "depths": np.sort(rng.uniform(1, 4, (ROWS, 8)), -1).astype("float32"),
        "colour": rng.random((ROWS, 3)).astype("float32"),
    }
    return Stranger(Radiance(), loss, batch)


# -- a player ---------------------------------------------------------------------------------------------------------
class ActorCritic(nn.Module):
    width: int = 32

    @nn.compact
    def __call__(self, seen: Any) -> Any:
        for _ in range(2):
            seen = jnp.tanh(nn.Dense(self.width)(seen))
        return nn.log_softmax(nn.Dense(5)(seen)), nn.Dense(1)(seen)[..., 0]


def actor_critic() -> Stranger:
    """PPO's clipped objective, the critic's error, and entropy."""

    def loss(model: Any, batch: Any) -> Any:
        logs, value = model(batch["seen"])
        taken = jnp.take_along_axis(logs, batch["action"][:, None], -1)[:, 0]
        ratio = jnp.exp(taken - batch["log before"])
        gain = batch["advantage"]
        objective = jnp.minimum(ratio * gain, jnp.clip(ratio, 0.8, 1.2) * gain)
        entropy = -jnp.sum(jnp.exp(logs) * logs, -1)
        return -objective.mean() + 0.5 * jnp.mean((value - batch["return"]) ** 2) - 0.01 * entropy.mean()

    rng = random()
    batch = {
        "seen": rng.normal(size=(ROWS, 9)).astype("float32"),
        "action": rng.integers(0, 5, ROWS).astype("int32"),
        "log before": -1.6 + 0.1 * rng.normal(size=ROWS).astype("float32"),
        "advantage": rng.normal(size=ROWS).astype("float32"),
        "return": rng.normal(size=ROWS).astype("float32"),
    }
    return Stranger(ActorCritic(), loss, batch)
