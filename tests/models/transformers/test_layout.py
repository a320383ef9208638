import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cjax.models.transformers.layout import parse, read, write

# A layout, the shape of the model's array, the number of parts, and the same by NumPy: the file's array to the model's.
LAYOUTS = {
    "x -> x": ((5,), 1, lambda a, _: a),
    "out in -> in out": ((3, 4), 1, lambda a, _: a.T),
    "(heads width) embed -> embed heads width": ((5, 2, 3), 1, lambda a, _: a.reshape(2, 3, 5).transpose(2, 0, 1)),
    "embed (heads width) -> heads width embed": ((2, 3, 5), 1, lambda a, _: a.T.reshape(2, 3, 5)),
    "embed (3 heads width) -> embed heads width": ((5, 2, 4), 3, lambda a, i: a.reshape(5, 3, 2, 4)[:, i]),
    "(3 heads width) -> heads width": ((2, 4), 3, lambda a, i: a.reshape(3, 2, 4)[i]),
    "1 1 embed -> embed": ((5,), 1, lambda a, _: a[0, 0]),
    "embed channel row column -> row column channel embed": ((2, 3, 4, 5), 1, lambda a, _: a.transpose(2, 3, 1, 0)),
}


class Recorder:
    """An array that remembers how much of it was read."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.num_read = array, 0

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        part = self.array[index]
        self.num_read += part.size
        return part


@given(text=st.sampled_from(sorted(LAYOUTS)), data=st.data())
def test_a_part_is_the_part_of_the_whole_and_no_more_is_read_than_its_heads(text: str, data: st.DataObject):
    shape, num_parts, by_numpy = LAYOUTS[text]
    part = data.draw(st.integers(0, num_parts - 1))
    bounds = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    index = tuple(slice(low, high) for low, high in bounds)
    stored_shape = parse(text).stored_shape(shape)
    stored = np.arange(np.prod(stored_shape)).reshape(stored_shape)
    recorder = Recorder(stored)
    found = read(parse(text), part, shape, index, recorder)
    np.testing.assert_array_equal(found, by_numpy(stored, part)[index])
    if text.endswith("embed heads width") and "3" in text:
        whole_heads = (index[0].stop - index[0].start) * (index[1].stop - index[1].start) * shape[2]
        assert recorder.num_read == whole_heads
    elif "(" not in text:
        assert recorder.num_read == found.size


@pytest.mark.parametrize("text", LAYOUTS)
def test_writing_is_the_inverse_of_reading(text: str):
    shape, num_parts, _ = LAYOUTS[text]
    pieces = {i: np.random.default_rng(i).normal(size=shape) for i in range(num_parts)}
    stored = write(parse(text), pieces)
    assert stored.shape == parse(text).stored_shape(shape)
    for i, piece in pieces.items():
        np.testing.assert_array_equal(read(parse(text), i, shape, (slice(None),) * len(shape), stored), piece)


def test_only_contiguous_parts_are_read():
    with pytest.raises(ValueError, match="contiguous"):
        read(parse("x -> x"), 0, (5,), (slice(0, 5, 2),), np.zeros(5))
    with pytest.raises(TypeError, match="slices"):
        read(parse("x -> x"), 0, (5,), (3,), np.zeros(5))
