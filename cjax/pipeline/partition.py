"""Which layers each block of a pipeline holds, and in which order a stack of layers is kept for it.

A stack of L layers is cut into equal blocks of ceil(L / blocks) layers; where that does not divide, the last blocks
have fewer, since the last stage has the head and the loss to do as well. Where these cost as much as several layers,
all blocks take more, and the last one fewer or none. Each of several stacks (an encoder, a decoder)
is cut over all stages, so that a stage holds a part of both: no device keeps rows for layers that it never runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from cjax.pipeline.route import blocks_of


@dataclass(frozen=True)
class Partition:
    """Layers by block.

    Args:
      route: the stage of each block.
      stack: for each block, the stack its layers are of.
      first: for each block, its first layer in that stack.
      count: for each block, how many layers it has.
      rows: for each stack, how many layers a block has room for.
    """

    route: tuple[int, ...]
    stack: tuple[int, ...]
    first: tuple[int, ...]
    count: tuple[int, ...]
    rows: tuple[int, ...]

    def row(self, block: int) -> int:
        """Where a block's first layer is, among the layers of its stack that its stage keeps."""
        # A stage's rows of one stack lie behind each other in the order of its chunks; `order` lays the stack out in
        # the same way, or stages would run other layers' weights.
        mine = [b for b in blocks_of(self.route)[self.route[block]] if self.stack[b] == self.stack[block]]
        return mine.index(block) * self.rows[self.stack[block]]

    def order(self, stack: int) -> tuple[int, ...]:
        """The layer in each row of a stack as it is kept, stage after stage; -1 where a row has none.

        >>> partition([5], (0, 1, 0, 1)).order(0)
        (0, 1, 4, -1, 2, 3, -1, -1)
        """
        found = []
        for blocks in blocks_of(self.route):
            for block in (b for b in blocks if self.stack[b] == stack):
                layers = range(self.first[block], self.first[block] + self.count[block])
                found += [*layers, *[-1] * (self.rows[stack] - len(layers))]
        return tuple(found)

    def owners(self, stack: int) -> tuple[int, ...]:
        """The stage of each layer of a stack.

        >>> partition([5], (0, 1, 0, 1)).owners(0)
        (0, 0, 1, 1, 0)
        """
        blocks = [block for block, of in enumerate(self.stack) if of == stack]
        return tuple(self.route[block] for block in blocks for _ in range(self.count[block]))

    def is_even(self, stack: int) -> bool:
        return all(n == self.rows[stack] for n, k in zip(self.count, self.stack, strict=True) if k == stack)

    def starts(self, block: int) -> bool:
        """Whether this block is the first of its stack."""
        return block == 0 or self.stack[block - 1] != self.stack[block]

    def ends(self, block: int) -> bool:
        return block == len(self.route) - 1 or self.stack[block + 1] != self.stack[block]


def partition(lengths: Sequence[int], route: tuple[int, ...], head: float = 0.0) -> Partition:
    """Cut stacks of these lengths into the blocks of a route, equally many blocks each.

    Args:
      lengths: layers of each stack.
      route: the stage of each block.
      head: what comes after the last layer, in the arithmetic of one layer of the last stack.

    >>> partition([5], (0, 1, 2)).count, partition([12], (0, 1, 2, 3), head=5.4).count
    ((2, 2, 1), (4, 4, 4, 0))
    """
    num_blocks = len(route) // len(lengths)
    assert num_blocks * len(lengths) == len(route), (lengths, route)
    # Rounded up, and the last blocks short: every stage holds arrays of the same shape, as one program over all of them
    # needs.
    rows = [-(-length // num_blocks) for length in lengths]
    rows[-1] = _rows_beside(head, lengths[-1], num_blocks)
    places = [
        (k, min(i * n, length), max(0, min(n, length - i * n)))
        for k, (length, n) in enumerate(zip(lengths, rows, strict=True))
        for i in range(num_blocks)
    ]
    stack, first, count = (tuple(column) for column in zip(*places, strict=True))
    return Partition(route, stack, first, count, tuple(rows))


def _rows_beside(head: float, length: int, num_blocks: int) -> int:
    """How many layers a block has, so that a forward and a backward of the dearest block are as cheap as can be. The
    head runs forwards and backwards in a backward's tick."""
    least = -(-length // num_blocks)

    def ticks(rows: int) -> float:
        last = max(0, length - (num_blocks - 1) * rows)
        return rows + max(2 * rows, 2 * last + 3 * head)

    best = min(range(least, 2 * least + 1), key=ticks)
    # They have to pay: more rows are more memory, and more that the optimizer has to update.
    return best if ticks(best) < 0.85 * ticks(least) else least
