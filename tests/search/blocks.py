"""All blocks, from the files that define them."""

from search import arrays, control, layers
from search.registry import BLOCKS, Block

assert {run.run.__module__.rpartition(".")[2] for run in BLOCKS.values()} == {
    part.__name__.rpartition(".")[2] for part in (arrays, control, layers)
}

__all__ = ["BLOCKS", "Block"]
