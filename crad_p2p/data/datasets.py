"""Image data sets as arrays in memory: named ones, and any ``.npz`` file.

Free of torch at import; torchvision and medmnist (two seconds each) are imported only by the set that needs them.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crad_p2p.errors import DataError
from crad_p2p.federation import TORCHVISION_SETS, DataSettings
from crad_p2p.randomness import generator

#: Without class names the labels themselves say how many classes there are; beyond this they are ids of something else.
MAX_UNNAMED_CLASSES = 10_000
#: Pixels a side of an image must have: the architectures halve it twice.
MIN_SIDE = 4

_CIFAR_FILES = {
    "cifar10": ("cifar-10-batches-py", (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch", "batches.meta")),
    "cifar100": ("cifar-100-python", ("train", "test", "meta")),
}
_CIFAR_MOMENTS = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}
_AUGMENTATION = {"cifar10": "crop_hflip", "cifar100": "crop_hflip", "pathmnist": "hvflip"}


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Images with their labels.

    Attributes:
        images: uint8 [n, C, H, W], C = 1 or 3, contiguous.
        labels: int64 [n], 0 <= label < number of classes.
        groups: int64 [n], images of one group (patient) have one number; None where the settings name no groups.
    """

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    groups: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, eq=False)
class Dataset:
    """A training set, to be divided among the peers, and the official test set.

    Attributes:
        name: as given in the federation file.
        train: what the shards are cut from.
        test: global accuracy is measured on it, and it serves nothing else.
        class_names: one name per class, by label.
        mean, std: per channel, of images scaled to [0, 1].
        augmentation: ``none``, ``crop``, ``crop_hflip`` or ``hvflip``, never ``auto``.
    """

    name: str
    train: ImageSet
    test: ImageSet
    class_names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    augmentation: str


def load_dataset(settings: DataSettings, *, seed: int, data_dir: Path, download: bool = False) -> Dataset:
    """Load a data set into memory, its training part cut to ``settings.samples`` images.

    Args:
        settings: which set, how many training images (groups are cut along), which augmentation, and which groups.
        seed: the federation seed; it draws the training images to keep, so all peers keep the same.
        data_dir: this host's folder for the files of CIFAR and MedMNIST; ``npz:PATH`` and digits do not use it.
        download: fetch absent files of CIFAR and MedMNIST into ``data_dir``. One process at a time.

    Raises:
        DataError: a file is absent, damaged, or does not hold what it must.
    """
    name = settings.dataset
    if name == "digits":
        dataset = _load_digits()
    elif name in TORCHVISION_SETS:
        dataset = _load_cifar(name, data_dir, download)
    elif name.startswith("npz:"):
        path = Path(name.removeprefix("npz:"))
        dataset = _with_default_moments(name, *_read_npz(path, group_by=settings.partition.by))
    else:
        dataset = _load_medmnist(name, data_dir, download)
    train = dataset.train
    if settings.samples is not None and settings.samples < len(train):
        kept = _stratified_draw(train.labels, settings.samples, generator(seed, "samples"))
        groups = None if train.groups is None else train.groups[kept]
        train = ImageSet(train.images[kept], train.labels[kept], groups)
    augmentation = settings.augmentation
    return dataclasses.replace(
        dataset,
        train=train,
        # A small shift keeps the label of any image; a mirror image does not (digits, left and right lung).
        augmentation=_AUGMENTATION.get(name, "crop") if augmentation == "auto" else augmentation,
    )


def _with_default_moments(name: str, train: ImageSet, test: ImageSet, class_names: tuple[str, ...]) -> Dataset:
    half = (0.5,) * train.images.shape[1]
    return Dataset(name, train, test, class_names, half, half, "none")


def _stratified_draw(labels: NDArray[np.int64], total: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Draw ``total`` <= n indices, ascending; class shares stay, and every class if ``total`` allows."""
    classes, counts = np.unique(labels, return_counts=True)
    ideal = counts * total / len(labels)
    quota = np.floor(ideal).astype(np.int64)
    if total >= len(classes):
        quota = np.maximum(quota, 1)
    while quota.sum() > total:  # the minimum of one made it too many
        quota[np.argmax(np.where(quota > 1, quota - ideal, -np.inf))] -= 1
    while quota.sum() < total:  # largest remainder
        quota[np.argmax(ideal - quota)] += 1
    drawn = [rng.permutation(np.flatnonzero(labels == c))[:k] for c, k in zip(classes, quota, strict=True)]
    return np.sort(np.concatenate(drawn))


# ---------------------------------------------------------------------------------------------------------- digits


def _load_digits() -> Dataset:
    package = importlib.util.find_spec("sklearn")  # found, not imported: the import would take a second in each process
    if package is None or not package.submodule_search_locations:
        raise DataError("data set 'digits' ships with scikit-learn, which is not installed: pip install scikit-learn")
    path = Path(package.submodule_search_locations[0], "datasets", "data", "digits.csv.gz")
    try:
        table = np.loadtxt(path, delimiter=",", dtype=np.uint8)
    except (OSError, EOFError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({_reason(error)}); reinstall scikit-learn") from None
    images = np.round(table[:, :-1].reshape(-1, 1, 8, 8) * (255 / 16)).astype(np.uint8)
    labels = table[:, -1].astype(np.int64)
    # There is no official test part; this one is the same in every federation, whatever its seed.
    test = _stratified_draw(labels, round(0.2 * len(labels)), generator(0, "digits test part"))
    train = np.setdiff1d(np.arange(len(labels)), test)
    return _with_default_moments(
        "digits",
        ImageSet(images[train], labels[train]),
        ImageSet(images[test], labels[test]),
        tuple(map(str, range(10))),
    )


# ----------------------------------------------------------------------------------------------------------- CIFAR


def _load_cifar(name: str, data_dir: Path, download: bool) -> Dataset:
    folder, files = _CIFAR_FILES[name]
    absent = [file for file in files if not os.access(data_dir / folder / file, os.R_OK)]
    if absent and not download:
        raise DataError(
            f"{data_dir / folder / absent[0]}: not found or not readable; run once with --download, or unpack "
            f"https://www.cs.toronto.edu/~kriz/{name.replace('cifar', 'cifar-')}-python.tar.gz in {data_dir}"
        )
    from torchvision.datasets import CIFAR10, CIFAR100

    source = {"cifar10": CIFAR10, "cifar100": CIFAR100}[name]
    try:
        parts = [source(root=data_dir, train=train, download=download) for train in (True, False)]
    except (RuntimeError, OSError, HTTPException) as error:
        failure = "cannot be downloaded" if download else "is damaged"
        raise DataError(
            f"{data_dir / folder}: {failure} ({_reason(error)}); delete the folder and run with --download, or unpack "
            f"{source.url} in {data_dir}"
        ) from None
    train, test = (
        ImageSet(np.ascontiguousarray(part.data.transpose(0, 3, 1, 2)), np.asarray(part.targets, dtype=np.int64))
        for part in parts
    )
    return Dataset(name, train, test, tuple(parts[0].classes), *_CIFAR_MOMENTS[name], augmentation="none")


# -------------------------------------------------------------------------------------------------------- MedMNIST


def _load_medmnist(name: str, data_dir: Path, download: bool) -> Dataset:
    import medmnist

    path = data_dir / f"{name}.npz"
    info = medmnist.INFO[name]
    if not os.access(path, os.R_OK):
        if not download:
            raise DataError(
                f"{path}: not found or not readable; run once with --download, or save {info['url']} under this name"
            )
        try:
            data_dir.mkdir(parents=True, exist_ok=True)
            # By way of a scratch folder, so that a download cut half-way leaves no file that looks complete.
            with tempfile.TemporaryDirectory(dir=data_dir) as scratch:
                getattr(medmnist, info["python_class"])(split="train", download=True, root=scratch, size=28)
                Path(scratch, path.name).replace(path)
        except (RuntimeError, OSError) as error:
            raise DataError(
                f"{path}: cannot be downloaded ({_reason(error)}); save {info['url']} under this name"
            ) from None
    names = tuple(info["label"][str(label)] for label in range(len(info["label"])))
    return _with_default_moments(name, *_read_npz(path, names))


# ------------------------------------------------------------------------------------------------------------- npz


def _read_npz(
    path: Path, class_names: tuple[str, ...] | None = None, group_by: str | None = None
) -> tuple[ImageSet, ImageSet, tuple[str, ...]]:
    """Read train part, test part and class names; ``class_names``, if given, stand above those of the file. The groups
    of the train part are in its array ``train_`` ``group_by``.
    """
    arrays = _read_arrays(path, group_by)
    if class_names is None and "class_names" in arrays:
        class_names = _class_names(path, arrays["class_names"])
    images = {part: _images(path, f"{part}_images", arrays) for part in ("train", "test")}
    labels = {
        part: _labels(path, f"{part}_labels", arrays, len(images[part]), class_names) for part in ("train", "test")
    }
    train_shape, test_shape = images["train"].shape[1:], images["test"].shape[1:]
    if train_shape != test_shape:
        raise DataError(
            f"{path}: 'train_images' and 'test_images' must hold images of one shape, found {_shape(train_shape)} and "
            f"{_shape(test_shape)} (channels, height, width); resize one of them"
        )
    if class_names is None:
        class_names = tuple(map(str, range(max(int(part.max()) for part in labels.values()) + 1)))
    groups = None if group_by is None else _groups(path, f"train_{group_by}", arrays, len(images["train"]))
    return ImageSet(images["train"], labels["train"], groups), ImageSet(images["test"], labels["test"]), class_names


def _read_arrays(path: Path, group_by: str | None) -> dict[str, NDArray[Any]]:
    required = ["train_images", "train_labels", "test_images", "test_labels"]
    key = None
    # A damaged file can make numpy, zipfile or a decompressor raise almost anything.
    try:
        file = np.load(path, allow_pickle=False)
        if not isinstance(file, np.lib.npyio.NpzFile):
            raise ValueError("it holds a single array without a name")
        with file:
            missing = [name for name in required if name not in file.files]
            if missing:
                found = ", ".join(file.files) or "none"
                raise DataError(
                    f"{path}: must hold the arrays {', '.join(missing)}, found {found}; add what is missing"
                )
            if group_by is not None and f"train_{group_by}" not in file.files:
                raise DataError(
                    f"{path}: must hold the array train_{group_by}, which says of every training image to which group "
                    f"it belongs (data.partition.by: {group_by}), found {', '.join(file.files)}; add it, or name "
                    f"another one"
                )
            arrays = {}
            for key in (*required, "class_names", *([] if group_by is None else [f"train_{group_by}"])):
                if key in file.files:
                    arrays[key] = file[key]
            return arrays
    except DataError:
        raise
    except FileNotFoundError:
        raise DataError(f"{path}: not found; give the path of an .npz file with {', '.join(required)}") from None
    except Exception as error:
        what = f"'{key}' cannot be read" if key else "cannot be read as an .npz file"
        raise DataError(
            f"{path}: {what} ({_reason(error)}); save plain arrays, of numbers or strings, with numpy.savez"
        ) from None


def _class_names(path: Path, array: NDArray[Any]) -> tuple[str, ...]:
    if array.dtype.kind != "U" or array.ndim != 1 or not len(array):
        raise DataError(
            f"{path}: 'class_names' must be a list of strings, one per class, found {array.dtype} {_shape(array.shape)}"
        )
    return tuple(map(str, array))


def _images(path: Path, key: str, arrays: dict[str, NDArray[Any]]) -> NDArray[np.uint8]:
    array = arrays[key]
    if array.dtype != np.uint8:
        raise DataError(f"{path}: '{key}' must be uint8 (0 to 255), found {array.dtype}; convert it before saving")
    shape = array.shape
    if len(shape) == 3:
        array = array[..., np.newaxis]
    if array.ndim != 4 or array.shape[-1] not in (1, 3):
        raise DataError(
            f"{path}: '{key}' must have the shape [n, H, W] or [n, H, W, 1] (grey) or [n, H, W, 3] (RGB), "
            f"found {_shape(shape)}; bring it to one of these"
        )
    if 0 in shape:
        raise DataError(f"{path}: '{key}' is empty, shape {_shape(shape)}; it must hold at least one image")
    if min(array.shape[1:3]) < MIN_SIDE:
        raise DataError(
            f"{path}: '{key}' holds images of {array.shape[1]}x{array.shape[2]} pixels; at least {MIN_SIDE}x{MIN_SIDE} "
            f"are needed; enlarge them before saving"
        )
    return np.ascontiguousarray(array.transpose(0, 3, 1, 2))


def _labels(
    path: Path, key: str, arrays: dict[str, NDArray[Any]], count: int, class_names: Sequence[str] | None
) -> NDArray[np.int64]:
    array = arrays[key]
    if array.ndim == 2 and array.shape[1] > 1:
        raise DataError(
            f"{path}: '{key}' has {array.shape[1]} labels per image, and CRAD learns single-label classes; "
            f"save one class number per image"
        )
    if array.ndim not in (1, 2) or array.dtype.kind not in "biuf":
        raise DataError(
            f"{path}: '{key}' must be whole numbers of shape [n] or [n, 1], found {array.dtype} {_shape(array.shape)}"
        )
    if len(array) != count:
        raise DataError(
            f"{path}: '{key}' has {len(array)} rows for {count} images in '{key.replace('labels', 'images')}'; "
            f"every image needs one label"
        )
    array = array.reshape(-1)
    classes = MAX_UNNAMED_CLASSES if class_names is None else len(class_names)
    bad = (array < 0) | (array >= classes)
    if array.dtype.kind == "f":
        bad |= array != np.floor(array)  # NaN too
    if bad.any():
        row = int(bad.argmax())
        known = "there are no class names" if class_names is None else f"there are {classes} class names"
        raise DataError(
            f"{path}: '{key}' row {row} is {array[row]}, but labels must be whole numbers from 0 to {classes - 1} "
            f"({known}); renumber the classes"
        )
    return array.astype(np.int64)


def _groups(path: Path, key: str, arrays: dict[str, NDArray[Any]], count: int) -> NDArray[np.int64]:
    """The groups, numbered in the order of their first images: whatever they are called, all hosts number them alike.

    Returns:
        int64 [n].
    """
    array = arrays[key]
    fits = array.ndim == 1 or (array.ndim == 2 and array.shape[1] == 1)
    if not fits or array.dtype.kind not in "iufUS":
        raise DataError(
            f"{path}: '{key}' must be whole numbers or strings of shape [n] or [n, 1], one for each training image, "
            f"found {array.dtype} {_shape(array.shape)}; save the group of every image"
        )
    if len(array) != count:
        raise DataError(
            f"{path}: '{key}' has {len(array)} rows for {count} images in 'train_images'; every image needs one group"
        )
    array = array.reshape(-1)
    if array.dtype.kind in "US":
        bad = array == np.zeros(1, array.dtype)  # the empty string
    else:
        bad = ~np.isfinite(array) | (array != np.floor(array))
    if bad.any():
        row = int(bad.argmax())
        raise DataError(
            f"{path}: '{key}' row {row} is {str(array[row]) or 'empty'}, but groups must be whole numbers or strings; "
            f"give every image a group"
        )
    _, first, number = np.unique(array, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first)).astype(np.int64)[number]


def _shape(shape: Sequence[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _reason(error: Exception) -> str:
    """What went wrong, one sentence without full stop, to stand in brackets."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # One sentence: numpy goes on to advise allow_pickle.
    return lines[0].partition(". ")[0].rstrip(".") if lines else type(error).__name__
