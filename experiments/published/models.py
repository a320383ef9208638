"""Shapes of models that the rows name and whose sources print no dims, from their public configurations."""

from cjax.planner.costs.transformer import Decoder

# The vocabulary where a source names none: GPT-2's, filled up as Megatron does.
VOCAB = 51200

# Width of the feed-forward layer and heads of keys and values, where they are not 4 x hidden and heads.
LLAMAS = {
    (4096, 32, 32000): (11008, 32),
    (4096, 32, 128256): (14336, 8),
    (5120, 40, 32000): (13824, 40),
    (8192, 64, 32000): (28672, 8),
    (8192, 64, 128256): (28672, 8),
    (16384, 128, 128256): (53248, 8),
    (4096, 32, 103168): (11008, 32),  # InternLM
}
NAMED = {
    "GPT3-5B": Decoder(24, 4096, 32, VOCAB),
    "GPT3-20B": Decoder(44, 6144, 48, VOCAB),
    "Nemotron-8B": Decoder(32, 4096, 32, 256000, is_tied=False),
    "Nemotron-22B": Decoder(40, 6144, 48, 256000, is_tied=False),
    "Nemotron-340B": Decoder(96, 18432, 96, 256000, kv_heads=8, is_tied=False),
    "Llama-2-34b": Decoder(48, 8192, 64, 32000, ffn=22016, kv_heads=8, is_gated=True, is_tied=False),
}


def decoder_of(row: dict[str, str]) -> Decoder | None:
    """The model of a row, or None where its shapes are not known."""
    if row["model"] in NAMED:
        return NAMED[row["model"]]
    if not row["hidden"]:
        return None
    hidden, vocab = int(row["hidden"]), int(row["vocab"] or VOCAB)
    layers = int(row["layers"] or 0) or _layers(row, hidden, vocab)
    heads = int(row["heads"] or hidden // _usual_head(hidden))
    if layers is None:
        return None
    if (found := LLAMAS.get((hidden, heads, vocab))) and "MPT" not in row["model"]:
        return Decoder(layers, hidden, heads, vocab, found[0], found[1], is_gated=True, is_tied=False)
    return Decoder(layers, hidden, heads, vocab)


def _layers(row: dict[str, str], hidden: int, vocab: int) -> int | None:
    """From the number of parameters."""
    if not row["params"].endswith("B"):
        return None
    return round((float(row["params"][:-1]) * 1e9 - vocab * hidden) / (12 * hidden * hidden))


def _usual_head(hidden: int) -> int:
    """Features of a head: those nearest to 128 that divide."""
    return min((size for size in range(64, 257) if hidden % size == 0), key=lambda size: abs(size - 128))
