"""An npz file of one site: ``train_images`` and ``train_labels``, and perhaps ``val_…`` and ``test_…``.

Labels are matched by name: they are names themselves, or numbers of the names in ``class_names``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crad_p2p.data.own.formats import render_array
from crad_p2p.data.own.listing import Classes, Item, Listing, Reader, cannot_read, named, stamp_of
from crad_p2p.data.own.rendering import Rendering
from crad_p2p.errors import DataError

#: Name in the file to the part it is of.
_PREFIXES = {"train": "train", "val": "validation", "test": "test"}
_PATIENTS = "train_patient"


def list_npz(place: str, path: Path, classes: Classes) -> Listing:
    """List it: labels are read, images not yet. Where it has ``val_…`` or ``test_…``, each image has a part; what the
    file has as ``train`` may still be divided (:mod:`crad_p2p.data.own.parts`).

    Raises:
        DataError: it cannot be read, or does not hold what it must.
    """
    try:
        stamp = stamp_of(path.stat())
    except OSError as error:
        raise cannot_read(path, error) from None
    arrays = _read(path, [f"{prefix}_labels" for prefix in _PREFIXES] + ["class_names", _PATIENTS], must=())
    present = [prefix for prefix in _PREFIXES if f"{prefix}_labels" in arrays]
    if not present:
        raise DataError(
            f"{path}: must hold train_images and train_labels (and perhaps val_… and test_…), and has no labels; add "
            f"what is missing"
        )
    items = []
    for prefix in present:
        numbers = _class_numbers(path, f"{prefix}_labels", arrays, classes)
        patients = _patients(path, arrays, len(numbers)) if prefix == "train" else None
        part = None if present == ["train"] else _PREFIXES[prefix]
        items += [
            Item(f"{prefix}_images[{row:06d}]", label, patients[row] if patients else None, part, stamp)
            for row, label in enumerate(numbers)
        ]

    def reader(rendering: Rendering) -> Reader:
        images = _read_images(path, present, {prefix: len(arrays[f"{prefix}_labels"]) for prefix in present})

        def read(item: Item) -> tuple[str, NDArray[np.uint8]]:
            prefix, _, row = item.name.partition("_images[")
            return render_array(images[prefix][int(row[:-1])], rendering)

        return read

    return Listing(place, tuple(sorted(items, key=lambda item: item.name)), reader=reader)


def _read(path: Path, names: list[str], must: tuple[str, ...]) -> dict[str, NDArray[Any]]:
    key = None
    # A damaged file can make numpy, zipfile or a decompressor raise almost anything.
    try:
        with np.load(path, allow_pickle=False) as file:
            missing = [name for name in must if name not in file.files]
            if missing:
                found = ", ".join(file.files) or "none"
                raise DataError(
                    f"{path}: must hold the arrays {', '.join(missing)}, found {found}; add what is missing"
                )
            arrays = {}
            for key in names:
                if key in file.files:
                    arrays[key] = file[key]
            return arrays
    except DataError:
        raise
    except OSError as error:
        raise cannot_read(path, error) from None
    except Exception as error:
        what = f"'{key}' cannot be read" if key else "cannot be read as an .npz file"
        lines = str(error).splitlines() or [type(error).__name__]
        raise DataError(f"{path}: {what} ({lines[0].rstrip('.')}); save plain number arrays with numpy.savez") from None


def _read_images(path: Path, present: list[str], counts: dict[str, int]) -> dict[str, NDArray[Any]]:
    keys = tuple(f"{prefix}_images" for prefix in present)
    arrays = _read(path, list(keys), keys)
    images = {}
    for prefix, key in zip(present, keys, strict=True):
        array = arrays[key]
        if array.dtype not in (np.uint8, np.uint16):
            raise DataError(f"{path}: '{key}' must be uint8 or uint16, found {array.dtype}; convert it before saving")
        if array.ndim not in (3, 4) or (array.ndim == 4 and array.shape[-1] not in (1, 3)) or 0 in array.shape[1:]:
            raise DataError(
                f"{path}: '{key}' must have the shape [n, H, W] or [n, H, W, 1] (grey) or [n, H, W, 3] (RGB), found "
                f"{list(array.shape)}; bring it to one of these"
            )
        if len(array) != counts[prefix]:
            raise DataError(
                f"{path}: '{prefix}_labels' has {counts[prefix]} rows for {len(array)} images in '{key}'; every image "
                f"needs one label"
            )
        images[prefix] = array
    return images


def _class_numbers(path: Path, key: str, arrays: dict[str, NDArray[Any]], classes: Classes) -> list[int]:
    """The federation's class of each row."""
    labels = arrays[key]
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1 or labels.dtype.kind not in "biuU":
        raise DataError(
            f"{path}: '{key}' must be class names or whole numbers of shape [n] or [n, 1], found {labels.dtype} "
            f"{list(labels.shape)}; save one class an image"
        )
    if labels.dtype.kind == "U":
        names = [str(name) for name in labels]
    else:
        names = _names_of(path, key, labels, arrays.get("class_names"), classes)
    numbers: dict[str, int] = {}
    for row, name in enumerate(names):
        if name not in numbers:
            number = classes.number(name)
            if number is None:
                raise classes.no_class(f"{path}: '{key}' row {row}, class", name, "correct class_names or the labels")
            numbers[name] = number
    return [numbers[name] for name in names]


def _names_of(path: Path, key: str, labels: NDArray[Any], known: NDArray[Any] | None, classes: Classes) -> list[str]:
    if known is None:
        raise DataError(
            f"{path}: must hold 'class_names', since the number of a class says nothing at another site; add them, in "
            f"the order of the numbers in '{key}' (the federation has {named(classes.names)})"
        )
    if known.dtype.kind != "U" or known.ndim != 1 or not len(known):
        raise DataError(
            f"{path}: 'class_names' must be a list of strings, one a class, found {known.dtype} {list(known.shape)}"
        )
    if len({str(name) for name in known}) != len(known):
        raise DataError(f"{path}: 'class_names' has a name twice; every class number needs its own")
    if len(labels) and not (labels.min() >= 0 and labels.max() < len(known)):
        row = int(((labels < 0) | (labels >= len(known))).argmax())
        raise DataError(
            f"{path}: '{key}' row {row} is {labels[row]}, and there are {len(known)} class_names, from 0 to "
            f"{len(known) - 1}; correct the labels"
        )
    return [str(known[number]) for number in labels.astype(np.int64)]


def _patients(path: Path, arrays: dict[str, NDArray[Any]], count: int) -> list[str] | None:
    patients = arrays.get(_PATIENTS)
    if patients is None:
        return None
    if patients.shape != (count,) or patients.dtype.kind not in "iuU":
        raise DataError(
            f"{path}: '{_PATIENTS}' must be a text or whole number for each of {count} images, found {patients.dtype} "
            f"{list(patients.shape)}"
        )
    texts = [str(patient) for patient in patients]
    if "" in texts:
        raise DataError(f"{path}: '{_PATIENTS}' row {texts.index('')} is empty; every image needs one, or none has")
    return texts
