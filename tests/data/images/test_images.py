import builtins
import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from cjax.data import ImageData, image_data
from cjax.data.images.arrays import ImageArrays, held_out_of
from cjax.data.images.images import shifted


def some(num: int, height: int = 6, width: int = 5, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (num, height, width), np.uint8)


@pytest.fixture
def data() -> ImageData:
    # Pixel (2, 2) of image i is i: a mark that says which image it was, wherever it goes.
    pixels = np.zeros([23, 5, 5], np.uint8)
    pixels[:, 2, 2] = np.arange(1, 24)
    source = ImageArrays(pixels, np.arange(23) % 3)
    return ImageData(source, source, ("a", "b", "c"), np.float32([0.5]), np.float32([0.25]), batch_size=4, shift=2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for label, name in enumerate(("cat", "dog")):
        (tmp_path / name).mkdir()
        for i in range(10):
            Image.fromarray(np.full([6, 5], 100 * label + i, np.uint8)).save(tmp_path / name / f"{i}.png")
    return tmp_path


def first(data: ImageData, count: int, start: int = 0) -> dict[str, np.ndarray]:
    found = list(itertools.islice(data.batches(start), count))
    return {name: np.concatenate([batch[name] for batch in found]) for name in found[0]}


def marks(data: ImageData, images: np.ndarray) -> np.ndarray:
    return np.rint((images * data.std + data.mean) * 255).astype(int).max(axis=(1, 2, 3))


def test_what_is_read_is_what_the_file_holds(tmp_path: Path) -> None:
    x, x_test = some(30), some(7, seed=1)
    arrays = dict(x_train=x, y_train=np.arange(30) % 4, x_test=x_test, y_test=np.arange(7) % 4)
    np.savez(tmp_path / "some.npz", **arrays)
    data = image_data(tmp_path / "some.npz", batch_size=3)
    assert (data.num_classes, data.classes, data.image_shape) == (4, ("0", "1", "2", "3"), (6, 5, 1))
    np.testing.assert_allclose(data.mean, (x / 255).mean(), rtol=1e-6)
    np.testing.assert_allclose(data.std, (x / 255).std(), rtol=1e-6)
    found = {name: np.concatenate([b[name] for b in data.validation()]) for name in ("images", "labels")}
    assert found["images"].dtype == np.float32 and found["labels"].dtype == np.int32
    np.testing.assert_array_equal(found["labels"], arrays["y_test"])
    np.testing.assert_allclose(found["images"][..., 0], (x_test / 255 - data.mean) / data.std, rtol=1e-5, atol=1e-6)
    epoch = first(data, 10)
    pairs = {(image.tobytes(), int(label)) for image, label in zip(epoch["images"], epoch["labels"], strict=True)}
    assert len(pairs) == 30  # each once, with its own label
    np.testing.assert_allclose(epoch["images"].mean(), 0, atol=1e-5)
    np.testing.assert_allclose(epoch["images"].std(), 1, atol=1e-5)
    given = image_data(tmp_path / "some.npz", batch_size=3, mean=0.5, std=[0.25], classes=list("abcd"))
    assert (given.mean.tolist(), given.std.tolist(), given.classes) == ([0.5], [0.25], ("a", "b", "c", "d"))


def test_a_part_is_held_out_where_the_file_has_none(tmp_path: Path) -> None:
    labels = np.repeat([0, 1, 2], [50, 30, 20])
    np.savez(tmp_path / "some.npz", images=some(100), labels=labels)
    data = image_data(tmp_path / "some.npz", batch_size=4, held_out=0.2)
    np.testing.assert_array_equal(np.bincount(data.held_out.labels), [10, 6, 4])
    again = image_data(tmp_path / "some.npz", batch_size=7, held_out=0.2, seed=5)
    np.testing.assert_array_equal(again.held_out[:]["images"], data.held_out[:]["images"])
    together = np.concatenate([data.train[:]["images"], data.held_out[:]["images"]])
    assert len(np.unique(together.reshape(100, -1), axis=0)) == 100
    assert len(list(image_data(tmp_path / "some.npz", batch_size=4, held_out=0).validation())) == 0


@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.floats(0, 0.9))
def test_the_part_held_out_is_that_of_each_class(labels: list[int], part: float) -> None:
    array = np.array(labels)
    kept = held_out_of(array, part)
    for label in np.unique(array):
        members = array == label
        assert kept[members].sum() == round(part * members.sum())


def test_digits() -> None:
    data = image_data(batch_size=32)
    assert data.image_shape == (8, 8, 1) and data.num_classes == 10
    assert len(data.train) + len(data.held_out) == 1797 and 170 < len(data.held_out) < 190
    assert data.train[:]["images"].max() == 1
    assert image_data(batch_size=32, channels=3).image_shape == (8, 8, 3)


def test_grey_images_are_repeated_for_three_channels(tmp_path: Path) -> None:
    np.savez(tmp_path / "some.npz", images=some(20), labels=np.arange(20) % 2)
    data = image_data(tmp_path / "some.npz", batch_size=20, channels=3, held_out=0)
    images = next(data.batches())["images"]
    assert images.shape == (20, 6, 5, 3) and data.mean.shape == (3,)
    np.testing.assert_array_equal(images[..., 0], images[..., 2])


def test_colours_have_a_mean_each(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).normal([0.0, 1.0, 5.0], [1.0, 2.0, 3.0], (50, 6, 5, 3))
    np.savez(tmp_path / "some.npz", images=pixels, labels=np.arange(50) % 2)
    data = image_data(tmp_path / "some.npz", batch_size=50, held_out=0)
    np.testing.assert_allclose(data.mean, pixels.mean((0, 1, 2)), rtol=1e-5)
    images = next(data.batches())["images"]
    np.testing.assert_allclose(images.mean((0, 1, 2)), 0, atol=1e-5)
    np.testing.assert_allclose(images.std((0, 1, 2)), 1, atol=1e-5)


def test_a_folder(folder: Path) -> None:
    data = image_data(folder, batch_size=4, held_out=0.2, mean=0, std=1)
    assert data.classes == ("cat", "dog") and data.image_shape == (6, 5, 1)
    assert (len(data.train), len(data.held_out)) == (16, 4)
    epoch = first(data, 4)
    values = np.rint(epoch["images"][:, 0, 0, 0] * 255).astype(int)
    np.testing.assert_array_equal(values // 100, epoch["labels"])
    held = np.concatenate([batch["images"][:, 0, 0, 0] for batch in data.validation()])
    assert sorted([*values, *np.rint(held * 255).astype(int)]) == [*range(10), *range(100, 110)]
    measured = image_data(folder, batch_size=4, held_out=0.2)
    np.testing.assert_allclose(measured.mean, (values / 255).mean(), rtol=1e-5)
    np.testing.assert_allclose(measured.std, (values / 255).std(), rtol=1e-5)


def test_a_folder_held_out_beside_it(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    for name in ("cat", "dog"):
        (other / name).mkdir()
        Image.fromarray(np.full([6, 5], 7, np.uint8)).save(other / name / "x.png")
    data = image_data(folder, batch_size=4, held_out=other)
    assert (len(data.train), len(data.held_out), data.held_out.labels.tolist()) == (20, 2, [0, 1])
    (other / "horse").mkdir()
    Image.fromarray(np.full([6, 5], 7, np.uint8)).save(other / "horse" / "x.png")
    with pytest.raises(ValueError, match="has the classes cat, dog, .* cat, dog, horse"):
        image_data(folder, batch_size=4, held_out=str(other))


def test_files_of_several_sizes_and_kinds(folder: Path) -> None:
    colours = np.zeros([12, 10, 3], np.uint8)
    colours[..., 0] = 200
    Image.fromarray(colours).save(folder / "cat" / "red.jpeg", quality=95)
    with pytest.raises(ValueError, match=r"images of 2 sizes.* 6 x 5 \(20\), 12 x 10 \(1\)\. Give size=\(6, 5\)"):
        image_data(folder, batch_size=4)
    data = image_data(folder, batch_size=21, size=(4, 8), held_out=0, mean=0, std=1)
    assert data.image_shape == (4, 8, 3)
    images = next(data.batches())["images"]
    (red,) = images[images[..., 0] - images[..., 1] > 0.5].reshape(-1, 32, 3)
    np.testing.assert_allclose(red.mean(0), [200 / 255, 0, 0], atol=0.02)
    assert image_data(folder, batch_size=4, size=8, channels=1).image_shape == (8, 8, 1)


def test_all_that_is_wrong_with_a_folder_is_listed(folder: Path) -> None:
    (folder / "cat" / "notes.txt").write_text("hm")
    (folder / "bird").mkdir()
    Image.fromarray(np.zeros([6, 5], np.uint8)).save(folder / "lost.png")
    with pytest.raises(ValueError) as caught:
        image_data(folder, batch_size=4)
    lines = [line.strip() for line in str(caught.value).splitlines()[1:]]
    assert lines == [
        "lost.png: in no class", "bird: a class without images", "cat/notes.txt: not a PNG or JPEG file",
    ]  # fmt: skip


def test_all_files_that_cannot_be_read_are_listed(folder: Path) -> None:
    (folder / "cat" / "bad.png").write_bytes(b"no image")
    whole = (folder / "dog" / "3.png").read_bytes()
    (folder / "dog" / "3.png").write_bytes(whole[: len(whole) // 2])
    Image.fromarray(np.full([6, 5], 4000, np.uint16)).save(folder / "dog" / "deep.png")
    with pytest.raises(ValueError) as caught:
        image_data(folder, batch_size=4)
    message = str(caught.value)
    assert "remove or repair them" in message and "dog/deep.png: has more than 8 bits a channel" in message
    assert "cat/bad.png: cannot identify" in message and "dog/3.png: " in message
    assert len(message.splitlines()) == 4


def test_a_folder_without_classes(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no sub-folders; one for each class"):
        image_data(tmp_path, batch_size=1)


# --- while it is trained ---


@given(st.integers(-3, 3), st.integers(-2, 2))
def test_shifted_images(down: int, right: int) -> None:
    image = np.arange(1, 13).reshape(4, 3, 1)
    moved = shifted(image, down, right)
    for y, x in itertools.product(range(4), range(3)):
        inside = 0 <= y - down < 4 and 0 <= x - right < 3
        assert moved[y, x, 0] == (image[y - down, x - right, 0] if inside else 0)


def test_training_images_move_and_others_stay(data: ImageData) -> None:
    found = first(data, 23)
    # Each image four times, somewhere within two pixels of where it was; and black stays black.
    np.testing.assert_array_equal(np.bincount(marks(data, found["images"]))[1:], np.full(23, 4))
    np.testing.assert_array_equal((marks(data, found["images"]) - 1) % 3, found["labels"])
    black = np.float32((0 - 0.5) / 0.25)
    assert ((found["images"] == black).sum(axis=(1, 2, 3)) == 24).all()
    places = {tuple(np.argwhere(image[..., 0] != black)[0]) for image in found["images"]}
    assert places == set(itertools.product(range(5), range(5)))
    scored = np.concatenate([batch["images"] for batch in data.validation()])
    assert (scored[:, 2, 2, 0] != black).all()
    still = first(dataclasses.replace(data, shift=0), 5)["images"]
    assert (still[:, 2, 2, 0] != black).all()


def test_every_other_image_is_mirrored() -> None:
    pixels = np.zeros([64, 4, 4], np.uint8)
    pixels[:, :, 0] = 255
    source = ImageArrays(pixels, np.zeros(64, int))
    data = ImageData(source, source, ("a",), np.float32([0]), np.float32([1]), 64, flip=True)
    left = next(data.batches())["images"][:, :, 0, 0].all(axis=1)
    right = next(data.batches())["images"][:, :, 3, 0].all(axis=1)
    assert (left ^ right).all() and 16 < right.sum() < 48
    assert next(dataclasses.replace(data, flip=False).batches())["images"][:, :, 0, 0].all()


@pytest.mark.full
@given(start=st.integers(0, 60), count=st.sampled_from([1, 2, 4]), rows=st.sampled_from([4, 8]))
def test_any_number_of_processes_sees_the_same_images_move_alike(start: int, count: int, rows: int) -> None:
    source = ImageArrays(some(23), np.arange(23) % 3)
    one = ImageData(source, source, ("a", "b", "c"), np.float32([0]), np.float32([1]), 1, shift=2, flip=True, seed=3)
    whole = first(one, 2 * rows, start)
    many = [dataclasses.replace(one, batch_size=rows, shard=(index, count)) for index in range(count)]
    streams = [data.batches(start) for data in many]
    together = [next(stream)["images"] for _ in range(2) for stream in streams]
    np.testing.assert_array_equal(np.concatenate(together), whole["images"])


def test_another_seed_and_epoch_move_otherwise(data: ImageData) -> None:
    def places(data: ImageData, start: int = 0) -> dict[int, int]:
        images = first(dataclasses.replace(data, batch_size=23), 1, start)["images"]
        return dict(zip(marks(data, images), images.reshape(23, -1).argmax(1), strict=True))

    assert places(data) == places(data)
    assert places(data) != places(data, start=23)
    assert places(data) != places(dataclasses.replace(data, seed=1))


def test_validation_reads_each_image_once(data: ImageData) -> None:
    assert [len(batch["labels"]) for batch in data.validation()] == [4, 4, 4, 4, 4, 3]
    assert [len(batch["labels"]) for batch in data.validation(max_batches=2)] == [4, 4]
    found = np.concatenate([marks(data, batch["images"]) for batch in data.validation()])
    np.testing.assert_array_equal(found, np.arange(1, 24))
    halves = [list(dataclasses.replace(data, shard=(index, 2)).validation()) for index in range(2)]
    assert [len(batch["labels"]) for batch in halves[0]] == [len(b["labels"]) for b in halves[1]] == [2] * 5 + [1]
    pairs = [marks(data, np.concatenate([a["images"], b["images"]])) for a, b in zip(*halves, strict=True)]
    np.testing.assert_array_equal(np.concatenate(pairs), np.arange(1, 23))


def test_identity_tells_other_images_and_another_stream(data: ImageData) -> None:
    assert data.identity == dataclasses.replace(data, batch_size=2, shard=(0, 2)).identity
    others = (
        dataclasses.replace(data, seed=1), dataclasses.replace(data, shift=1), dataclasses.replace(data, flip=True),
        dataclasses.replace(data, mean=np.float32([0.4])),
        dataclasses.replace(data, train=ImageArrays(some(23, 5, 5), np.arange(23) % 3)),
        dataclasses.replace(data, train=ImageArrays(np.zeros([23, 5, 5], np.uint8), np.arange(1, 24) % 3)),
    )  # fmt: skip
    for other in others:
        assert other.identity != data.identity


# --- what is refused ---

X, Y = some(12), np.arange(12) % 3
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "names": (dict(pictures=X, labels=Y), "holds pictures, labels, not images; it should hold x_train"),
    "no test labels": (dict(x_train=X, y_train=Y, x_test=X), "not y_test"),
    "counts": (dict(images=X, labels=Y[:5]), "holds 12 images, but 5 labels"),
    "shape": (dict(images=X[0], labels=Y[:6]), r"has shape \[6, 5\]; \[images, height, width\]"),
    "channels first": (dict(images=np.zeros([12, 3, 8, 8], np.uint8), labels=Y), "1 or 3 channels at the end"),
    "dtype": (dict(images=X.astype(np.int64), labels=Y), "is int64; uint8 is needed"),
    "not a number": (dict(images=np.full([12, 4, 4], np.nan), labels=Y), "not finite"),
    "columns of labels": (dict(images=X, labels=Y[:, None]), r"labels .* are int64\[12, 1\].*int\[12\]"),
    "float labels": (dict(images=X, labels=Y * 1.0), "are float64"),
    "negative labels": (dict(images=X, labels=Y - 1), "outside of 0 to 1, for 2 classes; .*label -1"),
    "a gap": (dict(images=X, labels=Y * 2), "no training image is of class 1, 3"),
    "other test size": (dict(x_train=X, y_train=Y, x_test=some(3, 7, 7), y_test=Y[:3]), "must be of one size"),
    "labels of the test": (dict(x_train=X, y_train=Y, x_test=X[:1], y_test=Y[:1] + 7), "of class 3, 4, 5, 6, 7"),
    "one colour": (dict(images=np.zeros([12, 4, 4], np.uint8), labels=Y), "channel without contrast"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_file_that_cannot_be_trained_on(name: str, tmp_path: Path) -> None:
    arrays, message = WRONG[name]
    np.savez(tmp_path / "some.npz", **arrays)
    with pytest.raises(ValueError, match=message):
        image_data(tmp_path / "some.npz", batch_size=2, held_out=0)


def test_arrays_of_different_sizes(tmp_path: Path) -> None:
    images = np.empty(2, object)
    images[:] = [np.zeros([3, 3]), np.zeros([4, 4])]
    np.savez(tmp_path / "some.npz", images=images, labels=np.array([0, 1]))
    with pytest.raises(ValueError, match="images in .* images of different sizes make it; all must be of one size"):
        image_data(tmp_path / "some.npz", batch_size=1)


OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "batch": (dict(batch_size=13), "batch_size is 13; write 1 to 12"),
    "shift": (dict(shift=5), "shift is 5 pixels; write 0 to 4"),
    "size": (dict(size=8), "for folders of image files"),
    "held_out": (dict(held_out=1.0), "held_out is 1.0"),
    "channels": (dict(channels=2), "channels is 2; write 1 or 3"),
    "classes": (dict(classes=["a", "b"]), "outside of 0 to 1, for 2 classes"),
    "mean": (dict(mean=[0.1, 0.2]), "one number, or one for each of 1 channels"),
    "std": (dict(std=0.0), "above 0 is needed"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_that_make_no_sense(name: str, tmp_path: Path) -> None:
    options, message = OPTIONS[name]
    np.savez(tmp_path / "some.npz", images=X, labels=Y)
    with pytest.raises(ValueError, match=message):
        image_data(tmp_path / "some.npz", **{"batch_size": 2, "held_out": 0, **options})


def test_other_paths(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no file or folder"):
        image_data(tmp_path / "nothing.npz", batch_size=1)
    (tmp_path / "text.npz").write_text("text")
    with pytest.raises(ValueError, match="is not an .npz file"):
        image_data(tmp_path / "text.npz", batch_size=1)
    with pytest.raises(ValueError, match="leave classes out"):
        image_data(folder, batch_size=1, classes=["a", "b"])


@pytest.mark.parametrize("package, message", [("sklearn", "pip install scikit-learn"), ("PIL", r"cjax\[data\]")])
def test_a_missing_package(package: str, message: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] == package:
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=message):
        image_data(None if package == "sklearn" else folder, batch_size=1)


def test_what_is_held_out_is_not_the_front_of_the_data():
    """Which is often the work of one day, or of one hand."""
    kept = held_out_of(np.repeat([0, 1], 50), 0.2)
    assert kept[:50].sum() == kept[50:].sum() == 10
    assert not kept[:10].all() and not kept[50:60].all()
