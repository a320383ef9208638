"""A decoder from its published shapes: its work, and how Megatron splits it. No model, no trace."""

import dataclasses
import math

from cjax.planner.work import (
    BATCH,
    AttentionWork,
    AxisMove,
    Dims,
    MatmulWork,
    NamedTensor,
    Part,
    Weight,
    Work,
    WorkSplit,
)

PAD = 128  # a vocabulary is filled up to a multiple of this for each device that splits it


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A stack of equal layers between an embedding and a head, as GPT and Llama are.

    Args:
      layers, hidden, heads, vocab: as published.
      ffn: width inside of the feed-forward layer; 4 x hidden where it is 0.
      kv_heads: heads of keys and values; `heads` where it is 0.
      is_gated: whether the feed-forward layer has a third matrix, as SwiGLU.
      is_tied: whether head and embedding are one table.
    """

    layers: int
    hidden: int
    heads: int
    vocab: int
    ffn: int = 0
    kv_heads: int = 0
    is_gated: bool = False
    is_tied: bool = True

    @property
    def inner(self) -> int:
        return self.ffn or 4 * self.hidden

    @property
    def layer_parameters(self) -> int:
        kv = (self.kv_heads or self.heads) * self.hidden // self.heads
        return self.hidden * (2 * self.hidden + 2 * kv + (3 if self.is_gated else 2) * self.inner)

    @property
    def num_parameters(self) -> int:
        """Matrices alone; norms and biases are thousandths of them.

        >>> Decoder(96, 12288, 96, 51200).num_parameters // 10**9
        174
        """
        return self.layers * self.layer_parameters + (1 if self.is_tied else 2) * self.vocab * self.hidden


@dataclasses.dataclass(frozen=True)
class Sharing:
    """What Megatron's words make of a decoder.

    Args:
      tensor: devices that share each matmul.
      is_split: whether what lies between the matmuls is split by positions, too.
      context: devices that share each sequence, keys and values going round them.
    """

    tensor: int = 1
    is_split: bool = False
    context: int = 1


def work_of_decoder(decoder: Decoder, rows: int, positions: int, spread: Sharing = Sharing()) -> Work:
    """One step over `rows` sequences of so many positions.

    Dims that tensor parallelism splits are "heads", "kv", "inner" and "vocab"; context parallelism splits "positions",
    and "between" names the same positions where Megatron splits them between the matmuls.

    >>> round(work_of_decoder(Decoder(96, 12288, 96, 51200), 1536, 2048).model_flops / 1e18, 2)
    3.34
    """
    of = decoder
    vocab = math.ceil(of.vocab / (PAD * spread.tensor)) * PAD * spread.tensor
    stream: Dims = ((BATCH, rows), ("positions", positions))
    between: Dims = ((BATCH, rows), ("between", positions))
    hidden: Dims = (("hidden", of.hidden),)
    head = of.hidden // of.heads
    kv = of.kv_heads or of.heads
    heads: Dims = (("heads", of.heads), ("feature", head))
    kvs: Dims = (("kv", kv), ("feature", head))
    inner: Dims = (("inner", of.inner),)

    def product(read: int, there: Dims, out: Dims, times: int = 1) -> MatmulWork:
        return MatmulWork((), stream, there, out, reads=read, times=times)

    gates = 2 if of.is_gated else 1
    joined: Dims = (("heads", of.heads), ("feature", head + 2 * head * kv // of.heads))
    layer = Part(
        "layers",
        repeats=of.layers,
        # Queries, keys and values are one matmul, as are the two halves of a gated layer.
        products=(
            product(0, hidden, joined),
            product(1, heads, hidden),
            product(2, hidden, (("inner", gates * of.inner),)),
            product(3, inner, hidden),
        ),
        attentions=(
            AttentionWork(
                ((BATCH, rows),), (("heads", of.heads),), (("positions", positions),), (("keys", positions),),
                features=head, kv_heads=kv, is_causal=True,
            ),
        ),
        touched=(
            # Two norms (read, write), two sums with the stream (two read, one written), each in half precision.
            NamedTensor((*between, *hidden), 4, times=10),
            # Queries and keys turned and laid out; the result laid out.
            NamedTensor((*stream, *heads), 4, times=4),
            NamedTensor((*stream, *kvs), 4, times=2),
            # The activation reads what each gate gives and writes one.
            NamedTensor((*stream, *inner), 4, times=gates + 1),
        ),
        weights=(Weight("layer", (("parameters", of.layer_parameters),)),),
        stream=NamedTensor((*between, *hidden), 4),
    )  # fmt: skip
    table = Weight("table", (("vocab", vocab), *hidden))
    first = Part("embedding", touched=(NamedTensor((*between, *hidden), 4, times=2),), weights=(table,))
    last = Part(
        "head",
        products=(MatmulWork((), stream, hidden, (("vocab", vocab),), reads=0),),
        # The loss is computed in float32: cast, shifted, exponentials, their sum.
        touched=(NamedTensor((*stream, ("vocab", vocab)), 4, is_computed=False, times=2),),
        weights=() if of.is_tied else (table,),
    )
    return Work((first, layer, last), rows, rows * positions)


def split_of_decoder(decoder: Decoder, work: Work, spread: Sharing = Sharing()) -> WorkSplit:
    """Megatron's split: two all-reduces of the stream in each pass over a layer, or a gather and a scatter in each
    one's place where positions are split as well; keys and values go round the devices that share a sequence.

    >>> spread = Sharing(tensor=8)
    >>> gpt = Decoder(96, 12288, 96, 51200)
    >>> split_of_decoder(gpt, work_of_decoder(gpt, 8, 2048), spread).num_devices
    8
    """
    tensor, context = spread.tensor, spread.context
    axes_of: dict[str, tuple[str, ...]] = {}
    axes = {"sequence": context, "tensor": tensor}
    if context > 1:
        axes_of |= {"positions": ("sequence",), "between": ("sequence",)}
    if tensor > 1:
        axes_of |= {name: ("tensor",) for name in ("heads", "kv", "inner", "vocab")}
        if spread.is_split:
            axes_of["between"] = (*axes_of.get("between", ()), "tensor")
    stream = work.tokens * decoder.hidden / context
    layer, ends = _tensor_moves(stream, tensor, spread.is_split), _ends_moves(stream, tensor, spread.is_split)
    if context > 1:
        kv = 2 * work.tokens * decoder.hidden * (decoder.kv_heads or decoder.heads) / decoder.heads / context / tensor
        once = (context - 1) * kv
        # Backward, keys and values come by again, and their gradients with them.
        layer += tuple(
            AxisMove("collective-permute", ("sequence",), once * times, is_forward=way, count=(context - 1))
            for way, times in ((True, 1), (False, 2))
        )
    held = tuple(sum(math.prod(size for _, size in weight.dims) for weight in part.weights) for part in work.parts)
    return WorkSplit(
        axes_of=axes_of,
        sizes={axis: size for axis, size in axes.items() if size > 1},
        moves=(ends[0], layer, ends[1]),
        held=tuple(size // tensor for size in held),
        in_lockstep=spread.is_split or context > 1,
    )


def _tensor_moves(stream: float, tensor: int, is_split: bool) -> tuple[AxisMove, ...]:
    if tensor == 1:
        return ()
    share = (tensor - 1) / tensor
    moves: list[AxisMove] = []
    for way in (True, False):
        if not is_split:
            moves.append(AxisMove("all-reduce", ("tensor",), 2 * 2 * share * stream, way, count=2))
            continue
        # The backward pass gathers the activations again, which are kept in parts.
        gathers = 2 if way else 4
        moves.append(AxisMove("all-gather", ("tensor",), gathers * share * stream, way, count=gathers))
        moves.append(AxisMove("reduce-scatter", ("tensor",), 2 * share * stream, way, count=2))
    return tuple(moves)


def _ends_moves(stream: float, tensor: int, is_split: bool) -> tuple[tuple[AxisMove, ...], tuple[AxisMove, ...]]:
    """The embedding's and the head's: one of the stream each, forward and backward."""
    if tensor == 1:
        return (), ()
    share = (tensor - 1) / tensor * (1 if is_split else 2)
    kinds = ("reduce-scatter", "all-gather") if is_split else ("all-reduce", "all-reduce")
    first = (AxisMove(kinds[0], ("tensor",), share * stream, True),)
    last = (AxisMove(kinds[1], ("tensor",), share * stream, False),)
    return first, last
