"""Batches of any random-access source: shuffled, split over processes, and found again from one integer.

The stream of a seed is one infinite sequence of samples. A batch is the next `batch_size` of them, and a process
takes its rows of it. So the position of a run is the number of samples consumed: it does not depend on how many
processes there were, nor on the batch size before.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from cjax.data.sources import Mixture, Source

Batch = dict[str, np.ndarray]
Transform = Callable[[Mapping[str, np.ndarray], np.random.Generator], Mapping[str, np.ndarray]]


def batches(
    source: Source,
    batch_size: int,
    *,
    seed: int | None,
    start: int = 0,
    shard: tuple[int, int] = (0, 1),
    transform: Transform | None = None,
) -> Iterator[Batch]:
    """The batches of `source`, from the global sample `start` on.

    Args:
        source: where samples come from.
        batch_size: rows of the global batch.
        seed: shuffles, another way each epoch, without end. None reads once, in order, whole batches only.
        start: global samples already consumed, by all processes together.
        shard: `(index, count)`: this process yields rows `index * batch_size / count` and on of each batch.
        transform: `(sample, rng) -> sample`, such as what masks words. The generator is made of the seed and of the
            sample's place in the stream: the same for any number of processes and after a resume, another each epoch.

    Raises:
        ValueError: a source shorter than a batch, or a batch that does not split over the processes.

    >>> source = [{"x": np.array(i)} for i in range(10)]
    >>> [batch["x"].tolist() for batch in batches(source, 4, seed=None)]
    [[0, 1, 2, 3], [4, 5, 6, 7]]
    >>> [batch["x"].tolist() for batch in batches(source, 4, seed=None, start=4, shard=(1, 2))]
    [[6, 7]]
    """
    grain = _grain()
    index, count = shard
    whole = all(isinstance(number, int | np.integer) for number in (batch_size, start, index, count))
    if not whole or batch_size < 1 or start < 0 or not 0 <= index < count:
        raise ValueError(
            f"batches got batch_size={batch_size}, start={start}, shard={shard}; "
            "it needs batch_size >= 1, start >= 0 and 0 <= index < count, whole numbers"
        )
    if batch_size % count:
        below = batch_size // count * count
        nearest = f"{below} or {below + count}" if below else f"{count}"
        raise ValueError(f"a batch of {batch_size} rows does not split over {count} processes; take {nearest}")
    if len(source) < batch_size:
        raise ValueError(
            f"the data holds {len(source)} samples, fewer than one batch of {batch_size}; "
            f"take a batch of at most {len(source)}, shorter samples, or more data"
        )
    samples = grain.MapDataset.source(source)
    num_batches = (len(source) - start) // batch_size
    if seed is not None:
        if not 0 <= seed < 2**32:
            raise ValueError(f"the seed of a shuffle must be at least 0 and below 2**32, not {seed}")
        is_mixed = isinstance(source, Mixture)
        samples = source.stream(grain, seed) if is_mixed else samples.shuffle(seed=seed).repeat()
        num_batches = (np.iinfo(np.int64).max - start) // batch_size
    rows = batch_size // count
    first = start + index * rows

    def sample(place: int) -> Mapping[str, np.ndarray]:
        found = samples[place]
        return found if transform is None else transform(found, np.random.default_rng([seed or 0, place]))

    def read(step: int) -> Batch:
        begin = first + step * batch_size
        return _stack([sample(begin + row) for row in range(rows)])

    stream = grain.MapDataset.range(max(num_batches, 0)).map(read)
    # One thread keeps order cheap; a few batches ahead hide a slow disk without holding much memory.
    return iter(stream.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)))


def whole_batches(
    source: Source,
    batch_size: int,
    max_batches: int | None = None,
    *,
    shard: tuple[int, int] = (0, 1),
    transform: Transform | None = None,
) -> Iterator[Batch]:
    """What is held out: read once, in order, at most `max_batches`; none if there is less than one."""
    num_batches = len(source) // batch_size
    if num_batches:
        stream = batches(source, batch_size, seed=None, shard=shard, transform=transform)
        yield from itertools.islice(stream, num_batches if max_batches is None else max_batches)


def _stack(samples: list[Mapping[str, np.ndarray]]) -> Batch:
    return {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}


def _grain() -> Any:
    try:
        import grain
    except ImportError as error:
        raise ImportError('batches are read through grain: pip install "cjax[data]"') from error
    return grain
