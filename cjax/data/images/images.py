"""Images for a classifier: normalised, shifted and flipped at random while it is trained, as they are when scored."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from cjax.data.images.arrays import digits, read_npz
from cjax.data.images.files import read_folder
from cjax.data.stream import Batch, batches


class ImageSource(Protocol):
    """Images of one size by index, as `ImageArrays` and `ImageFiles`: the numbers of 0 to 1 that files hold."""

    labels: np.ndarray
    shape: tuple[int, ...]

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any) -> dict[str, np.ndarray]: ...

    def moments(self) -> tuple[np.ndarray, np.ndarray]: ...

    def checksum(self) -> int: ...


@dataclasses.dataclass(frozen=True, eq=False)
class ImageData:
    """Images to train on and images held out, for a classifier.

    Batches are `{"images", "labels"}`, float32[rows, height, width, channels] and int32[rows].

    Attributes:
        train: images by index.
        held_out: the same, for validation; may be empty.
        classes: their names, in the order of the labels.
        mean: float32[channels], subtracted from what the source gives.
        std: float32[channels], divides what is left.
        batch_size: rows of the global batch.
        shift: training images move by up to so many pixels, up or down and left or right; black comes in.
        flip: mirrors every other training image, left for right.
        seed: order of the training images, and how each of them moves.
        shard: `(index, count)`, which process this is: `program.data_shard`.

    Raises:
        ValueError: fewer images than a batch, labels outside of the classes, classes without an image, or a shift as
            large as the image.

    >>> from cjax.data import ImageArrays
    >>> source = ImageArrays(np.arange(256, dtype=np.uint8).reshape(4, 8, 8), np.array([0, 1, 0, 1]))
    >>> data = ImageData(source, source, ("cat", "dog"), *source.moments(), batch_size=2, shift=1, flip=True)
    >>> next(data.batches())["images"].shape, data.num_classes
    ((2, 8, 8, 1), 2)
    """

    train: ImageSource
    held_out: ImageSource
    classes: tuple[str, ...]
    mean: np.ndarray
    std: np.ndarray
    batch_size: int
    shift: int = 0
    flip: bool = False
    seed: int = 0
    shard: tuple[int, int] = (0, 1)

    def __post_init__(self) -> None:
        for what, source in (("training", self.train), ("held-out", self.held_out)):
            outside = np.flatnonzero((source.labels < 0) | (source.labels >= self.num_classes))
            if len(outside):
                raise ValueError(
                    f"{len(outside)} of the {what} images have labels outside of 0 to {self.num_classes - 1}, for "
                    f"{self.num_classes} classes; the first is number {outside[0]}, label {source.labels[outside[0]]}"
                )
        counts = np.bincount(self.train.labels, minlength=self.num_classes)
        if empty := [self.classes[label] for label in np.flatnonzero(counts == 0)]:
            raise ValueError(f"no training image is of class {', '.join(empty)}; labels count from 0 without a gap")
        if not 1 <= self.batch_size <= len(self.train):
            raise ValueError(f"batch_size is {self.batch_size}; write 1 to {len(self.train)}, the training images")
        if not 0 <= self.shift < min(self.image_shape[:2]):
            raise ValueError(f"shift is {self.shift} pixels; write 0 to {min(self.image_shape[:2]) - 1}")

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return len(self.classes)

    @property
    def image_shape(self) -> tuple[int, ...]:
        """Height, width and channels."""
        return self.train.shape

    def batches(self, start: int = 0) -> Iterator[Batch]:
        """This process's rows of the training batches, without end, after `start` global samples."""
        return batches(
            self.train, self.batch_size, seed=self.seed, start=start, shard=self.shard, transform=self._for_training
        )

    def validation(self, max_batches: int | None = None) -> Iterator[Batch]:
        """This process's rows of the held-out images, once, in order; the last batch may be smaller.

        Of as many processes, so many images fewer than there are processes may be left out.
        """
        num_images, num_processes = len(self.held_out), self.shard[1]
        whole, rest = divmod(num_images, self.batch_size)
        parts = [(0, self.batch_size, whole), (whole * self.batch_size, rest - rest % num_processes, 1)]
        left = whole + 1 if max_batches is None else max_batches
        for start, rows, count in parts:
            count = min(count, left)
            left -= count
            if not rows or not count:
                continue
            stream = batches(self.held_out, rows, seed=None, start=start, shard=self.shard, transform=self._for_scoring)
            for _ in range(count):
                yield next(stream)

    @property
    def identity(self) -> dict[str, Any]:
        """What makes the stream what it is, so that a resumed run can tell whether it reads the same one."""
        return {
            "seed": self.seed,
            "num_images": len(self.train),
            "image_shape": list(self.image_shape),
            "shift": self.shift,
            "flip": self.flip,
            "mean": [round(float(x), 6) for x in self.mean],
            "std": [round(float(x), 6) for x in self.std],
            "checksum": self.train.checksum(),
        }

    def normalised(self, images: np.ndarray) -> np.ndarray:
        """float32[..., height, width, channels] of what the source gives."""
        return (images - self.mean) / self.std

    def _for_scoring(self, sample: Mapping[str, np.ndarray], rng: np.random.Generator) -> Batch:
        del rng
        return {"images": self.normalised(sample["images"]), "labels": sample["labels"]}

    def _for_training(self, sample: Mapping[str, np.ndarray], rng: np.random.Generator) -> Batch:
        images = sample["images"]
        if self.shift:
            down, right = rng.integers(-self.shift, self.shift + 1, 2)
            images = shifted(images, int(down), int(right))
        if self.flip and rng.random() < 0.5:
            images = images[:, ::-1]
        return {"images": self.normalised(images), "labels": sample["labels"]}


def shifted(image: np.ndarray, down: int, right: int) -> np.ndarray:
    """[height, width, channels] moved by so many pixels, which may be negative; zeros come in.

    >>> shifted(np.arange(1, 5).reshape(2, 2, 1), 0, 1)[..., 0]
    array([[0, 1],
           [0, 3]])
    """
    height, width, _ = image.shape
    moved = np.zeros_like(image)
    moved[max(down, 0) : height + min(down, 0), max(right, 0) : width + min(right, 0)] = image[
        max(-down, 0) : height + min(-down, 0), max(-right, 0) : width + min(-right, 0)
    ]
    return moved


def image_data(
    path: str | Path | None = None,
    *,
    batch_size: int,
    size: int | tuple[int, int] | None = None,
    channels: int | None = None,
    classes: Sequence[str] | None = None,
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
    held_out: float | str | Path = 0.1,
    shift: int = 0,
    flip: bool = False,
    seed: int = 0,
    shard: tuple[int, int] = (0, 1),
) -> ImageData:
    """Images from where they lie.

    Args:
        path: an `.npz` file with `x_train`, `y_train`, `x_test`, `y_test`, or `images` and `labels`; a folder with a
            sub-folder of PNG and JPEG files for each class; None takes scikit-learn's digits.
        batch_size: rows of the global batch.
        size: height and width to which the images of a folder are resized, through Pillow; needed if they differ.
        channels: 1 or 3; as the images are if None.
        classes: names of an `.npz` file's classes; the numbers of the labels if None. A folder has its own.
        mean: of each channel, or of all, subtracted; from the training images if None.
        std: the same, divides.
        held_out: the share of each class that is kept for validation, where there is no `x_test`; or for a folder
            another one with the same sub-folders.
        shift: training images move by up to so many pixels.
        flip: mirrors every other training image.
        seed: order of the training images, and how they move.
        shard: `(index, count)` of this process.

    Raises:
        FileNotFoundError: the path is not there.
        ImportError: a folder without Pillow, digits without scikit-learn.
        ValueError: images or labels that are not as said; see `ImageData` too. Files are all listed.

    >>> import tempfile
    >>> rng = np.random.default_rng(0)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "some.npz"
    ...     np.savez(path, images=rng.integers(0, 256, [60, 12, 12], np.uint8), labels=np.arange(60) % 3)
    ...     data = image_data(path, batch_size=6, shift=2)
    >>> next(data.batches())["images"].shape, data.num_classes, len(data.held_out)
    ((6, 12, 12, 1), 3, 6)
    """
    path = None if path is None else Path(path)
    if path is not None and not path.exists():
        raise FileNotFoundError(f"there is no file or folder {path}")
    if channels not in (None, 1, 3):
        raise ValueError(f"channels is {channels}; write 1 or 3, or leave it out")
    part = Path(held_out) if isinstance(held_out, (str, Path)) else held_out
    if not isinstance(part, Path) and not 0 <= part < 1:
        raise ValueError(f"held_out is {part}; it is a share of the images, at least 0 and below 1")
    if path is not None and path.is_dir():
        if classes is not None:
            raise ValueError("the classes of a folder are its sub-folders; leave classes out")
        both = (size, size) if isinstance(size, int) else size
        train, kept, names = read_folder(path, both, channels, part)
    else:
        if size is not None or isinstance(part, Path):
            raise ValueError("size, and a folder as held_out, are for folders of image files; arrays stay as they are")
        train, kept = digits(channels, part) if path is None else read_npz(path, channels, part)
        largest = max(int(source.labels.max(initial=0)) for source in (train, kept))
        names = tuple(classes) if classes is not None else tuple(str(label) for label in range(largest + 1))
    found = train.moments() if mean is None or std is None else (mean, std)
    center, spread = _each(found[0] if mean is None else mean, train), _each(found[1] if std is None else std, train)
    if not (spread > 0).all():
        raise ValueError(f"std is {spread.tolist()}: above 0 is needed, and a channel without contrast has 0; give std")
    return ImageData(train, kept, names, center, spread, batch_size, shift, flip, seed, shard)


def _each(value: Any, source: ImageSource) -> np.ndarray:
    """One number for each channel."""
    value = np.asarray(value, np.float32)
    if value.shape not in ((), source.shape[-1:]):
        raise ValueError(f"mean and std need one number, or one for each of {source.shape[-1]} channels, not {value}")
    return np.broadcast_to(value, source.shape[-1:])
