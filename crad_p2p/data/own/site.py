"""The images of one site, ready to be learned from; and the common test set, if the federation has one."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from crad_p2p.data.datasets import Dataset, ImageSet
from crad_p2p.data.own.arrays import list_npz
from crad_p2p.data.own.cache import Decoded, Progress, decode
from crad_p2p.data.own.folders import list_folder
from crad_p2p.data.own.listing import Classes, Listing
from crad_p2p.data.own.parts import divide
from crad_p2p.data.own.rendering import Rendering
from crad_p2p.data.own.summary import DataSummary, pixel_digests, summarise
from crad_p2p.data.own.tables import list_csv
from crad_p2p.data.partition import Split
from crad_p2p.data.place import split_place
from crad_p2p.errors import DataError
from crad_p2p.foreign import printable
from crad_p2p.randomness import generator

#: Names of the caches.
OWN, TEST = "own", "test"


@dataclass(frozen=True)
class Cache:
    """Where images are kept once they are read.

    Attributes:
        folder: that is written to.
        look_into: folders of others, which are only read.
    """

    folder: Path
    look_into: tuple[Path, ...] = ()


@dataclass(frozen=True, eq=False)
class CommonTest:
    """A test set that is the same on every site.

    Attributes:
        digest: sha256 (hex) of its files and their classes, in any order and under any names.
        pixels: a digest of each image as it is used.
    """

    images: ImageSet
    digest: str
    pixels: frozenset[bytes]


@dataclass(frozen=True, eq=False)
class Site:
    """One peer's own images.

    Attributes:
        dataset: its training set are all images of the site, its test set the common one, or empty.
        split: which of them are learned from, validated and tested.
        summary: for the site's own people.
        digest: sha256 (hex) of the files, their classes and parts: with these and no others the peer goes on.
        were_kept: nothing had to be read.
    """

    dataset: Dataset
    split: Split
    summary: DataSummary
    digest: str
    were_kept: bool


def list_place(place: str, classes: Classes) -> Listing:
    """All images at a place.

    Raises:
        DataError: there are none, or something does not fit.
    """
    kind, path = split_place(place)
    listing = {"folder": list_folder, "csv": list_csv, "npz": list_npz}[kind](place, path, classes)
    if not listing.items:
        why = ""
        for first in listing.refused[:1]:
            count = len(listing.refused)
            why = f" ({count} refused, the first: {printable(first.name, 200)}, which {printable(first.reason, 300)})"
        raise DataError(f"{path}: holds no image of any class{why}; put images there, or give another place")
    return listing


def load_test(
    place: str, class_names: Sequence[str], rendering: Rendering, cache: Cache, progress: Progress = lambda *_: None
) -> CommonTest:
    """Read the common test set. Of a place with parts (csv, npz) it is the part ``test``.

    Raises:
        DataError: it is not all there: it must be the same everywhere.
    """
    path = split_place(place)[1]
    listing = list_place(place, Classes(class_names))
    if any(item.part for item in listing.items):
        parts = tuple(item for item in listing.items if item.part == "test")
        if not parts:
            raise DataError(f"{path}: is to be the common test set (data.test), and has no image of the part 'test'")
        listing = Listing(place, parts, listing.refused, reader=listing.reader)
    found = decode(listing, rendering, cache.folder, TEST, progress=progress, look_into=cache.look_into)
    if refused := (*listing.refused, *found.refused):
        raise DataError(
            f"{path}: '{printable(refused[0].name, 200)}' {printable(refused[0].reason, 300)}"
            + (f", and {len(refused) - 1} more cannot be used" if len(refused) > 1 else "")
            + "; the common test set (data.test) must be whole, since it is the same on every site: mend or remove it "
            "on all"
        )
    labels = _labels(found)
    each = sorted(f"{digest} {class_names[label]}" for digest, label in zip(found.digests, labels, strict=True))
    digest = hashlib.sha256(json.dumps(each).encode()).hexdigest()
    return CommonTest(ImageSet(found.images, labels), digest, frozenset(pixel_digests(found.images)))


def load_site(
    place: str,
    class_names: Sequence[str],
    rendering: Rendering,
    *,
    holdout: float,
    augmentation: str,
    seed: int,
    peer: int,
    cache: Cache,
    test: CommonTest | None = None,
    progress: Progress = lambda *_: None,
) -> Site:
    """Read one site's images, and divide them by the federation's seed.

    Args:
        place: where they are, with an absolute path.
        holdout: share that is held out, where the site has not divided them itself.
        augmentation: as in the federation file.
        peer: whose they are.

    Raises:
        DataError: no image can be read, or none of a class of which there are some, or something does not fit.
        OSError: the cache cannot be written.
    """
    listing = list_place(place, Classes(class_names))
    found = decode(listing, rendering, cache.folder, OWN, progress=progress, look_into=cache.look_into)
    _require_every_class(listing, found, class_names)
    labels = _labels(found)
    split, how = divide(
        labels,
        [item.patient for item in found.items],
        [item.part for item in found.items],
        holdout,
        generator(seed, "holdout", peer=peer),
        may_cut=split_place(place)[0] == "npz",
    )
    summary = summarise(
        place,
        how,
        class_names,
        found.items,
        split,
        pixel_digests(found.images),
        (*listing.refused, *found.refused),
        listing.ignored,
        listing.empty,
        frozenset() if test is None else test.pixels,
    )
    nothing = ImageSet(np.empty((0, *rendering.shape), np.uint8), np.empty(0, np.int64))
    half = (0.5,) * rendering.channels
    dataset = Dataset(
        name=OWN,
        train=ImageSet(found.images, labels),
        test=nothing if test is None else test.images,
        class_names=tuple(class_names),
        mean=half,
        std=half,
        # A small shift keeps the label of any image.
        augmentation="crop" if augmentation == "auto" else augmentation,
    )
    return Site(dataset, split, summary, _digest(found, labels, split), found.were_kept)


def _labels(found: Decoded) -> NDArray[np.int64]:
    return np.array([item.label for item in found.items], dtype=np.int64)


def _require_every_class(listing: Listing, found: Decoded, class_names: Sequence[str]) -> None:
    """See that nothing is wrong with a whole class."""
    there = {item.label for item in found.items}
    claimed = Counter(item.label for item in listing.items)
    refused = {each.name: each.reason for each in found.refused}
    for label, count in sorted(claimed.items()):
        if label not in there:
            first = next(item.name for item in listing.items if item.label == label)
            raise DataError(
                f"{split_place(listing.place)[1]}: none of {count} files of class '{printable(class_names[label])}' "
                f"can be used; '{printable(first, 200)}' {printable(refused[first], 300)}: mend them, or take them away"
            )


def _digest(found: Decoded, labels: NDArray[np.int64], split: Split) -> str:
    digest = hashlib.sha256(labels.astype("<i8").tobytes())
    for part in (split.train, split.validation, split.test):
        digest.update(len(part).to_bytes(8, "little") + part.astype("<i8").tobytes())
    for each in found.digests:
        digest.update(bytes.fromhex(each))
    return digest.hexdigest()
