"""Images in files: a folder with one sub-folder for each class."""

import zlib
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from cjax.data.images.arrays import held_out_of, moments_of

ENDINGS = (".png", ".jpg", ".jpeg")
MAX_LISTED = 20


class ImageFiles:
    """Images of files and their classes by index: `{"images": float32[height, width, channels], "labels": int32}`.

    Each is read when it is asked for.

    Args:
        paths: PNG and JPEG files, known to be readable.
        labels: int[files].
        shape: height, width and channels; other sizes are resized to it, through Pillow.
    """

    def __init__(self, paths: Sequence[Path], labels: np.ndarray, shape: tuple[int, ...]):
        self._paths, self.labels, self.shape = paths, labels.astype(np.int32), shape

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        pixels = read_image(self._paths[index], self.shape)
        return {"images": pixels.astype(np.float32) / np.float32(255), "labels": self.labels[index]}

    def moments(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation of each channel, float64[channels]; reads every file."""

        def count(path: Path) -> np.ndarray:
            channels = np.moveaxis(read_image(path, self.shape), -1, 0)
            return np.stack([np.bincount(each.ravel(), minlength=256) for each in channels])

        with ThreadPoolExecutor() as pool:
            return moments_of(sum(pool.map(count, self._paths), np.zeros([self.shape[-1], 256], np.int64)))

    def checksum(self) -> int:
        """Of the files' names and their classes."""
        names = "\n".join(f"{path.parent.name}/{path.name}" for path in self._paths)
        return zlib.crc32(names.encode(), zlib.crc32(self.labels.astype("<i4").tobytes()))


def read_folder(
    path: Path, size: tuple[int, int] | None, channels: int | None, held_out: float | Path
) -> tuple[ImageFiles, ImageFiles, tuple[str, ...]]:
    """The images to train on, those held out, and the classes.

    Args:
        path: the folder.
        size: height and width that all are resized to, bilinearly; None for images that are of one size.
        channels: 1 or 3; None takes 1 if all are grey.
        held_out: the share of each class that is, or a folder of its own with the same sub-folders.

    Raises:
        ValueError: empty classes, files that can't be read, sizes that differ without `size`: all of them.
    """
    classes, paths, labels = _files(path)
    if isinstance(held_out, Path):
        more_classes, more_paths, more_labels = _files(held_out)
        if more_classes != classes:
            raise ValueError(f"{path} has the classes {', '.join(classes)}, {held_out} {', '.join(more_classes)}")
        kept = np.repeat([False, True], [len(paths), len(more_paths)])
        paths, labels = paths + more_paths, np.concatenate([labels, more_labels])
    else:
        kept = held_out_of(labels, held_out)
    shape = _common_shape(path, paths, size, channels)
    parts = [[paths[i] for i in np.flatnonzero(part)] for part in (~kept, kept)]
    return ImageFiles(parts[0], labels[~kept], shape), ImageFiles(parts[1], labels[kept], shape), classes


def read_image(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """A file as uint8[height, width, channels], resized if it is of another size."""
    image = _open(path).convert("L" if shape[-1] == 1 else "RGB")
    if image.size != (shape[1], shape[0]):
        image = image.resize((shape[1], shape[0]), _pillow().Resampling.BILINEAR)
    return np.asarray(image, np.uint8).reshape(shape)


def _files(folder: Path) -> tuple[tuple[str, ...], list[Path], np.ndarray]:
    """The classes of a folder, its files, and the class of each."""
    folders = sorted(each for each in folder.iterdir() if each.is_dir() and not each.name.startswith("."))
    if not folders:
        raise ValueError(f"{folder} has no sub-folders; one for each class is needed, with its PNG and JPEG files")
    paths: list[Path] = []
    labels: list[int] = []
    problems = [f"{file.name}: in no class" for file in sorted(folder.iterdir()) if file.suffix.lower() in ENDINGS]
    for label, sub in enumerate(folders):
        files = sorted(file for file in sub.iterdir() if not file.name.startswith("."))
        wrong = [file for file in files if file.is_dir() or file.suffix.lower() not in ENDINGS]
        problems += [f"{sub.name}/{file.name}: not a PNG or JPEG file" for file in wrong]
        good = [file for file in files if file not in set(wrong)]
        if not good:
            problems.append(f"{sub.name}: a class without images")
        paths += good
        labels += [label] * len(good)
    _refuse(folder, problems, "remove or convert them")
    return tuple(sub.name for sub in folders), paths, np.array(labels, np.int32)


def _common_shape(
    folder: Path, paths: Sequence[Path], size: tuple[int, int] | None, channels: int | None
) -> tuple[int, ...]:
    """Reads every file once, so that all that can't be read is known before training."""
    _pillow()

    def look(path: Path) -> tuple[tuple[int, int] | None, bool, str]:
        try:
            image = _open(path)
        except (OSError, SyntaxError, ValueError) as error:  # what Pillow raises for damaged files
            return None, False, f"{path.parent.name}/{path.name}: {error}"
        return (image.size[1], image.size[0]), image.mode in ("1", "L", "LA"), ""

    with ThreadPoolExecutor() as pool:
        seen = list(pool.map(look, paths))
    _refuse(folder, [problem for _, _, problem in seen if problem], "remove or repair them")
    sizes = Counter(found for found, _, _ in seen if found is not None)
    if size is None and len(sizes) > 1:
        most = sizes.most_common(1)[0][0]
        listed = ", ".join(f"{h} x {w} ({count})" for (h, w), count in sizes.most_common(8))
        more = f" and {len(sizes) - 8} more" if len(sizes) > 8 else ""
        raise ValueError(
            f"{folder} holds images of {len(sizes)} sizes, height x width: {listed}{more}. Give size={most}, or "
            "another: all are resized to it"
        )
    grey = all(is_grey for _, is_grey, _ in seen)
    return *(size or next(iter(sizes))), channels or (1 if grey else 3)


def _open(path: Path) -> Any:
    """The decoded image, upright."""
    from PIL import ImageOps

    with _pillow().open(path) as image:
        if image.mode.startswith(("I", "F")):  # Pillow would cut it at 255 and say nothing
            raise ValueError(f"has more than 8 bits a channel ({image.mode}); convert it to 8")
        return ImageOps.exif_transpose(image)


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError('image files are read through Pillow: pip install "cjax[data]"') from error
    return Image


def _refuse(folder: Path, problems: Sequence[str], what_to_do: str) -> None:
    if problems:
        more = [f"and {len(problems) - MAX_LISTED} more"] if len(problems) > MAX_LISTED else []
        lines = "\n  ".join([*problems[:MAX_LISTED], *more])
        raise ValueError(f"{folder} can't be read as it is; {what_to_do}:\n  {lines}")
