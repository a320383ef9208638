"""What processes tell each other about their parts of a folder."""

import jax
import numpy as np
from jax.experimental import multihost_utils


def last_commits(number: int, run: str) -> tuple[list[int], list[str]]:
    """Of all processes, in order: the number of the last commit, -1 if there is none, and the name of its run."""
    if jax.process_count() == 1:
        return [number], [run]
    text = np.frombuffer(f"{number:020d} {run}".encode(), np.uint8)
    texts = [bytes(each).decode().split() for each in multihost_utils.process_allgather(text)]
    return [int(number) for number, _ in texts], [run for _, run in texts]
