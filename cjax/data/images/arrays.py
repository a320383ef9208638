"""Images in memory: of an `.npz` file, or scikit-learn's digits."""

import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

NAMES = ("x_train", "y_train", "x_test", "y_test")


class ImageArrays:
    """Images and their classes by index: `{"images": float32[height, width, channels], "labels": int32}`.

    An array of indices gives as many images at once.

    Args:
        pixels: [images, height, width] or [images, height, width, channels]; uint8, read as 0 to 1, or floats.
        labels: int[images].
        channels: 1 or 3; grey images are repeated for 3. As they are if None.
        what: the name of the images in what is raised.

    Raises:
        ValueError: arrays of other shapes or dtypes, counts that differ, numbers that are not finite.

    >>> source = ImageArrays(np.full([4, 8, 8], 51, np.uint8), np.arange(4))
    >>> source[2]["images"].shape, float(source[2]["images"].max()), int(source[2]["labels"])
    ((8, 8, 1), 0.20000000298023224, 2)
    """

    def __init__(self, pixels: np.ndarray, labels: np.ndarray, channels: int | None = None, what: str = "images"):
        if pixels.ndim not in (3, 4) or (pixels.ndim == 4 and pixels.shape[-1] not in (1, 3)):
            raise ValueError(
                f"{what} has shape {list(pixels.shape)}; [images, height, width] is needed, or the same with 1 or 3 "
                "channels at the end"
            )
        if pixels.dtype != np.uint8 and not np.issubdtype(pixels.dtype, np.floating):
            raise ValueError(f"{what} is {pixels.dtype}; uint8 is needed, from 0 to 255, or floats")
        if pixels.dtype != np.uint8 and not np.isfinite(pixels).all():
            raise ValueError(f"{what} holds numbers that are not finite")
        if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
            raise ValueError(
                f"the labels of {what} are {labels.dtype}{list(labels.shape)}; one integer for each image is needed, "
                f"int[{len(pixels)}]"
            )
        if len(pixels) != len(labels):
            raise ValueError(f"{what} holds {len(pixels)} images, but {len(labels)} labels")
        self._pixels = pixels[..., None] if pixels.ndim == 3 else pixels
        given = self._pixels.shape[-1]
        if channels not in (None, 1, 3) or (channels == 1 and given == 3):
            raise ValueError(f"channels is {channels}, and {what} has {given}; write channels=3")
        self.labels = labels.astype(np.int32)
        self.shape: tuple[int, ...] = (*self._pixels.shape[1:3], channels or given)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: Any) -> dict[str, np.ndarray]:
        pixels = self._pixels[index]
        images = pixels.astype(np.float32) / np.float32(255 if pixels.dtype == np.uint8 else 1)
        if images.shape[-1] != self.shape[-1]:
            images = np.repeat(images, self.shape[-1], axis=-1)
        return {"images": images, "labels": self.labels[index]}

    def moments(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation of each channel, float64[channels]."""
        channels = np.moveaxis(self._pixels, -1, 0)
        if self._pixels.dtype == np.uint8:
            found = moments_of(np.stack([np.bincount(each.ravel(), minlength=256) for each in channels]))
        else:
            found = (
                np.array([each.mean(dtype=np.float64) for each in channels]),
                np.array([each.std(dtype=np.float64) for each in channels]),
            )
        mean, std = (np.broadcast_to(each, self.shape[-1:]) for each in found)
        return mean, std

    def checksum(self) -> int:
        """Of the labels and of the images at both ends: tells most other data apart, at no cost."""
        ends = np.ascontiguousarray(np.concatenate([self._pixels[:64], self._pixels[-64:]]))
        return zlib.crc32(ends.tobytes(), zlib.crc32(self.labels.astype("<i4").tobytes()))


def moments_of(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of bytes read as 0 to 1, of which int[channels, 256] says how often each occurs."""
    share = counts / counts.sum(axis=1, keepdims=True)
    values = np.arange(256) / 255
    mean = share @ values
    return mean, np.sqrt(np.maximum(share @ values**2 - mean**2, 0))


def read_npz(path: Path, channels: int | None, held_out: float) -> tuple[ImageArrays, ImageArrays]:
    """The images to train on and those held out, of a file with `x_train`, `y_train`, `x_test`, `y_test`, or with
    `images` and `labels`, of which a part is then held out."""
    arrays = _load(path)
    if "x_train" in arrays and "y_train" in arrays:
        names = NAMES if "x_test" in arrays or "y_test" in arrays else NAMES[:2]
    else:
        names = ("images", "labels")
    if missing := [name for name in names if name not in arrays]:
        raise ValueError(
            f"{path} holds {', '.join(arrays) or 'nothing'}, not {' and '.join(missing)}; it should hold "
            f"{', '.join(NAMES)}, or images and labels"
        )
    first = ImageArrays(arrays[names[0]], arrays[names[1]], channels, f"{names[0]} in {path}")
    if len(names) == 2:
        return split(first, arrays[names[0]], held_out)
    second = ImageArrays(arrays["x_test"], arrays["y_test"], channels, f"x_test in {path}")
    if first.shape != second.shape:
        raise ValueError(
            f"{path}: the images of x_train are {list(first.shape)}, those of x_test {list(second.shape)}; all must be "
            "of one size"
        )
    return first, second


def digits(channels: int | None, held_out: float) -> tuple[ImageArrays, ImageArrays]:
    """scikit-learn's 1,797 digits of 8 x 8 pixels, which come with it."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError(
            "without a path the images are scikit-learn's digits: pip install scikit-learn, or give an .npz file or a "
            "folder"
        ) from error
    found: Any = load_digits()
    pixels = (found.images / 16).astype(np.float32)
    return split(ImageArrays(pixels, found.target, channels, "digits"), pixels, held_out)


def split(source: ImageArrays, pixels: np.ndarray, held_out: float) -> tuple[ImageArrays, ImageArrays]:
    """The source in two, by `held_out_of`."""
    kept = held_out_of(source.labels, held_out)
    first, second = (ImageArrays(pixels[part], source.labels[part], source.shape[-1]) for part in (~kept, kept))
    return first, second


def held_out_of(labels: np.ndarray, part: float) -> np.ndarray:
    """bool[images]: which are held out, the same `part` of each class, and always the same ones."""
    order = np.random.default_rng(0).permutation(len(labels))
    kept = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        members = order[labels[order] == label]
        kept[members[: round(part * len(members))]] = True
    return kept


def _load(path: Path) -> Mapping[str, np.ndarray]:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path} is not an .npz file, as np.savez(path, images=..., labels=...) writes it")
    arrays: dict[str, np.ndarray] = {}
    with np.load(path, allow_pickle=False) as file:
        for name in file.files:
            try:
                arrays[name] = file[name]
            except (zipfile.BadZipFile, EOFError, OSError) as error:
                raise ValueError(f"{path} is damaged: {name} can't be read ({error}); copy it again") from error
            except ValueError as error:
                raise ValueError(
                    f"{name} in {path} is an array of objects, as images of different sizes make it; all must be of "
                    "one size, in one array [images, height, width] or [images, height, width, channels]"
                ) from error
    return arrays
