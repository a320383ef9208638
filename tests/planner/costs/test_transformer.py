"""Published shapes as work: the papers' own formulas say what it has to be."""

import pytest

from cjax.planner.costs.transformer import Decoder, Sharing, split_of_decoder, work_of_decoder

GPT3 = Decoder(96, 12288, 96, 51200)
LLAMA = Decoder(80, 8192, 64, 32000, ffn=28672, kv_heads=8, is_gated=True, is_tied=False)


@pytest.mark.parametrize(("decoder", "billions"), [(GPT3, 174.6), (LLAMA, 68.98)])
def test_parameters(decoder: Decoder, billions: float) -> None:
    assert decoder.num_parameters == pytest.approx(billions * 1e9, rel=0.002)
    work = work_of_decoder(decoder, 1, 2048)
    held = split_of_decoder(decoder, work).held
    assert held[0] + decoder.layers * held[1] + held[2] == pytest.approx(decoder.num_parameters, rel=0.002)


def test_flops_are_megatrons_formula() -> None:
    """72 B s l h^2 (1 + s / 6h + V / 12 l h), half of the attention's since it is causal."""
    b, s, h, layers = 16, 2048, GPT3.hidden, GPT3.layers
    wanted = 72 * b * s * layers * h**2 * (1 + s / (12 * h) + GPT3.vocab / (12 * layers * h))
    assert work_of_decoder(GPT3, b, s).model_flops == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("is_split", [False, True])
def test_a_layer_moves_four_streams_in_each_direction(is_split: bool) -> None:
    """Two all-reduces, which are a gather and a scatter each; split positions are gathered once more backward."""
    spread = Sharing(tensor=8, is_split=is_split)
    work = work_of_decoder(GPT3, 2, 2048, spread)
    moves = split_of_decoder(GPT3, work, spread).moves[1]
    stream = 2 * 2048 * GPT3.hidden * 7 / 8
    assert sum(move.elements for move in moves if move.is_forward) == pytest.approx(4 * stream)
    assert sum(move.elements for move in moves if not move.is_forward) == pytest.approx((6 if is_split else 4) * stream)


def test_keys_and_values_go_round_the_devices_that_share_a_sequence() -> None:
    spread = Sharing(tensor=2, context=4)
    work = work_of_decoder(LLAMA, 1, 8192, spread)
    split = split_of_decoder(LLAMA, work, spread)
    ring = [move for move in split.moves[1] if move.axes == ("sequence",)]
    # Of 8 heads a device has 4, of 8192 positions the others have three quarters.
    forward = 2 * (8192 * 3 / 4) * (4 * 128)
    assert [move.elements for move in ring] == pytest.approx([forward, 2 * forward])
    assert split.num_devices == 8
    assert split.held[1] == LLAMA.layer_parameters // 2


def test_a_vocabulary_is_filled_up_for_the_devices_that_split_it() -> None:
    work = work_of_decoder(Decoder(2, 256, 4, 50000), 1, 128, Sharing(tensor=8))
    assert dict(work.parts[2].products[0].outer)["vocab"] == 50176
