"""How much of a step waits for host memory and disk, beside the same step with everything on the device."""

import functools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from shared.results import Results, Row

import cjax
from cjax.walk.direct import BlockFile, allocate, buffer

NUM_LAYERS, WIDTH, NUM_ROWS, MEASURED, MICROBATCHES = 8, 512, 6144, 32 * 2**20, 8
AWAY = "offload=params+optimizer+gradients+activations"
PLANS = {"device": "budget=64GiB", "host": AWAY, "disk": f"{AWAY} host=0B disk=8GiB"}
OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-4),
    "clipped adamw": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4)),
}


class Layer(nn.Module):
    """Two matmuls and a residual."""

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        width = x.shape[-1]
        y = nn.Dense(4 * width)(nn.LayerNorm()(x))
        return x + nn.Dense(width)(nn.relu(y)) * NUM_LAYERS**-0.5, None


class Layers(nn.Module):
    """Layers in a scan."""

    num_layers: int = NUM_LAYERS

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        layers = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=self.num_layers)
        x, _ = layers()(x, None)
        return nn.Dense(4)(x)


def loss(model: Any, batch: Any) -> jax.Array:
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def overlap(optimizer: str, rounds: int, folder: Path) -> Row:
    """Steps in turn with rows on the device, in host memory and on disk: seconds, and what of them is waiting."""
    rng = np.random.default_rng(0)
    batch = {
        "x": rng.normal(size=(NUM_ROWS, WIDTH)).astype("float32"), "y": rng.normal(size=(NUM_ROWS, 4)).astype("float32")
    }  # fmt: skip
    first, rest = next(iter(PLANS)), f"data=1 microbatches={MICROBATCHES}"
    plain = cjax.parallelize(
        Layers(), loss, OPTIMIZERS[optimizer](), batch, f"{rest} {PLANS[first]}", devices=jax.devices()[:1],
        disk_folder=folder,
    )  # fmt: skip
    programs = {name: plain if name == first else plain.replan(f"{rest} {plan}") for name, plan in PLANS.items()}
    states: dict[str, Any] = {name: program.init(0) for name, program in programs.items()}
    times, waits, updates, commits = ({name: list[float]() for name in PLANS} for _ in range(4))
    watches = {name: Watch(program) for name, program in programs.items()}
    for number in range(rounds + 1):
        for name, program in programs.items():
            before, began, watch = waited(states[name]._rows), time.perf_counter(), watches[name]
            watch.update = watch.commit = 0.0
            states[name], metrics = program.step(states[name], batch)
            jax.block_until_ready((states[name], metrics))
            if number:  # the first compiles
                times[name].append(time.perf_counter() - began)
                waits[name].append(waited(states[name]._rows) - before + watch.commit)
                updates[name].append(watch.update)
                commits[name].append(watch.commit)
    copied, (read, written) = host_rate(), disk_rates(folder)
    found: Row = {"layers": NUM_LAYERS, "rows": NUM_ROWS, "rounds": rounds, "host_copy_GBs": round(copied / 1e9, 2)}
    found |= {"disk_read_GBs": round(read / 1e9, 2), "disk_write_GBs": round(written / 1e9, 2)}
    for name, program in programs.items():
        walk = program.report().walk
        assert walk is not None
        seconds = statistics.median(times[name])
        shares = {
            key: round(statistics.median(a / b for a, b in zip(of[name], times[name], strict=True)), 4)
            for key, of in (("waited_share", waits), ("update_share", updates), ("commit_share", commits))
        }
        moved = {each: walk.total(each) for each in ("link_in", "link_out", "disk_read", "disk_written")}
        # Nothing can be faster than its bytes by themselves.
        floors = {"floor_copy": (moved["link_in"] + moved["link_out"]) / copied}
        floors["floor_disk"] = moved["disk_read"] / read + moved["disk_written"] / written
        found[name] = {
            "seconds": round(seconds, 3),
            "to_device": round(statistics.median(a / b for a, b in zip(times[name], times[first], strict=True)), 3),
            "waited": round(statistics.median(waits[name]), 4),
            **shares,
            **moved,
            **{key: round(value, 3) for key, value in floors.items()},
        }
    return found


def overlaps(results: Results, folder: Path) -> None:
    """Both optimizers, the one that can be fused and the one that can't. Expected: little waiting where nothing is left
    for a pass of its own, and no step much longer than in memory."""
    for optimizer in OPTIMIZERS:
        own = folder / optimizer.replace(" ", "-")
        own.mkdir()
        key = {"part": "overlap", "optimizer": optimizer}
        print(results.get(key, functools.partial(overlap, optimizer, 5, own)))


class Watch:
    """Seconds of a program's last step: what its update, a pass of its own, has waited, and what its commit took beside
    waiting for rows."""

    def __init__(self, program: Any) -> None:
        self.update = self.commit = 0.0
        walking = program._walking
        update, commit = walking._walker.update, walking._commit

        def watched_update(held: Any, *args: Any) -> Any:
            before = waited(held)
            done = update(held, *args)
            self.update += waited(held) - before
            return done

        def watched_commit(state: Any) -> None:
            before, began = waited(state._rows), time.perf_counter()
            commit(state)
            self.commit += time.perf_counter() - began - (waited(state._rows) - before)

        walking._walker.update, walking._commit = watched_update, watched_commit


def waited(held: Any) -> float:
    """Seconds that rows have been waited for so far."""
    return sum(rows.waited for rows in held.every)


def host_rate() -> float:
    """Bytes/s of a copy from the device's memory to the host's."""
    x = jax.device_put(np.ones(MEASURED // 4, np.float32), jax.devices()[0])
    there = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    return MEASURED / statistics.median(
        _seconds(lambda: jax.block_until_ready(jax.device_put(x, there))) for _ in range(9)
    )


def disk_rates(folder: Path) -> tuple[float, float]:
    """Bytes/s read from the disk and written to it past the page cache, one piece after another."""
    path, data, pieces = folder / "rates", buffer(MEASURED), 8
    data[:] = 1
    allocate(path, pieces * MEASURED, b"")
    try:
        file = BlockFile(path)
        # Written twice: the first time, the disk may be giving the file its place.
        found = [
            [_seconds(functools.partial(move, at * MEASURED, data)) for at in range(pieces)]
            for move in (file.write, file.write, file.read)
        ]
        file.close()
    finally:
        path.unlink()
    return MEASURED / statistics.median(found[2]), MEASURED / statistics.median(found[1])


def _seconds(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began
