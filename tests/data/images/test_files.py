"""One image of a file."""

from pathlib import Path

import numpy as np
import pytest

from cjax.data.images.files import ImageFiles, read_image

Image = pytest.importorskip("PIL.Image", reason="the extra data is not installed")


@pytest.fixture
def halves(tmp_path: Path) -> Path:
    """White on the left, black on the right; 4 high and 8 wide."""
    pixels = np.repeat([[255, 0]], 4, 1).repeat(4, 0).astype(np.uint8)
    Image.fromarray(pixels).save(tmp_path / "halves.png")
    return tmp_path / "halves.png"


def test_white_is_one_and_black_is_zero(halves: Path) -> None:
    images = ImageFiles([halves], np.array([3]), (4, 8, 1))[0]["images"]
    assert images.dtype == np.float32 and set(images.flat) == {0.0, 1.0}


def test_an_image_that_is_resized_stays_upright(halves: Path) -> None:
    found = read_image(halves, (6, 16, 1))[..., 0]
    assert found.shape == (6, 16)
    assert (found[:, :6] == 255).all() and (found[:, 10:] == 0).all()
