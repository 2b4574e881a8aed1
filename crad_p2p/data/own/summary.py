"""What a site's images came to, for its own people: ``data-summary.json``, and a table of the same.

It has the true counts, whatever noise is on those that are published, and never leaves the host.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from crad_p2p.data.own.listing import PARTS, Item, Refused
from crad_p2p.data.partition import Split
from crad_p2p.durable import write_file
from crad_p2p.foreign import printable

JSON_FILE, TABLE_FILE = "data-summary.json", "data-summary.txt"
#: For the user who runs the peer alone, as the images.
_MODE = 0o600
#: Names that a table or log has, of many.
_SHOWN, _LOGGED = 1000, 5
#: Classes that the log has a line for.
_CLASSES = 30


@dataclass(frozen=True)
class Duplicates:
    """Images that look exactly alike once they are scaled.

    Attributes:
        groups: sets of two and more images that are the same.
        across_parts: those of them of which one image is learned from and another validated or tested, say.
        across_classes: those with more than one class.
        examples: the names of some of the last two kinds.
        in_common_test: training and validation images that are in the federation's common test set, too.
    """

    groups: int = 0
    across_parts: int = 0
    across_classes: int = 0
    examples: tuple[tuple[str, ...], ...] = ()
    in_common_test: int = 0


@dataclass(frozen=True)
class DataSummary:
    """Of one site.

    Attributes:
        place: where its images are.
        split: how they were divided.
        images: per class, per part.
        patients: per part; None where they are not known.
        refused: images that are not used.
        ignored: hidden files, and what operating systems leave behind.
        empty: classes with a directory and no image in it.
    """

    place: str
    split: str
    images: dict[str, dict[str, int]]
    patients: dict[str, int] | None
    refused: tuple[Refused, ...]
    ignored: int
    empty: tuple[str, ...]
    duplicates: Duplicates

    @property
    def lacking(self) -> list[str]:
        """Classes of which the site has no image."""
        return [name for name, parts in self.images.items() if not sum(parts.values())]

    @property
    def unvalidated(self) -> list[str]:
        """Classes that are learned from, and not validated: the site counts as knowing nothing of them."""
        return [name for name, parts in self.images.items() if parts["train"] and not parts["validation"]]

    def total(self, part: str) -> int:
        """Images of a part."""
        return sum(parts[part] for parts in self.images.values())

    def write(self, folder: Path) -> None:
        """Write both files, each whole or not at all."""
        write_file(folder / JSON_FILE, json.dumps(asdict(self), indent=1) + "\n", _MODE)
        text = "\n".join(self.table()) + "\n"
        write_file(folder / TABLE_FILE, text.encode("utf-8", "backslashreplace"), _MODE)

    def table(self) -> Iterator[str]:
        """Lines for people."""
        yield f"{printable(self.place, 500)}: divided {self.split}"
        yield ""
        rows = [(printable(name, 40), *(str(parts[part]) for part in PARTS)) for name, parts in self.images.items()]
        rows.append(("all images", *(str(self.total(part)) for part in PARTS)))
        if self.patients is not None:
            rows.append(("patients", *(str(self.patients[part]) for part in PARTS)))
        rows.insert(0, ("class", *PARTS))
        widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
        for first, *others in rows:
            numbers = (f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True))
            yield f"{first:<{widths[0]}}  {'  '.join(numbers)}"
        yield ""
        yield from self.warnings()
        yield from self.notes()
        for names in self.duplicates.examples:
            yield f"  alike: {', '.join(printable(name, 200) for name in names)}"
        for each in self.refused[:_SHOWN]:
            yield f"  refused: {printable(each.name, 300)}: {printable(each.reason, 300)}"
        if len(self.refused) > _SHOWN:
            yield f"  and {len(self.refused) - _SHOWN} more, which {JSON_FILE} has"

    def warnings(self) -> Iterator[str]:
        """What a person should look at, a sentence each."""
        if self.refused:
            first = self.refused[0]
            yield (
                f"{_images(len(self.refused), 'file')} refused, the first: {printable(first.name, 200)}, "
                f"which {printable(first.reason, 300)}"
            )
        same = self.duplicates
        if same.across_parts or same.across_classes:
            yield (
                f"{same.groups} image{'s are' if same.groups > 1 else ' is'} there more than once, "
                f"{same.across_parts} of them in two parts, {same.across_classes} with two classes"
            )
        if same.in_common_test:
            yield f"{_images(same.in_common_test, 'image')} also in the common test set"

    def notes(self) -> Iterator[str]:
        """What a person may like to know besides, a sentence each."""
        if self.ignored:
            yield f"{_images(self.ignored, 'hidden or system file')} ignored"
        if self.empty:
            yield f"without any image in the directory: {_few(self.empty)}"
        if others := [name for name in self.lacking if name not in self.empty]:
            yield f"without any image here: {_few(others)}"
        if self.unvalidated:
            yield (
                f"learned from, but with no image to validate (nothing is published of how well they are known): "
                f"{_few(self.unvalidated)}"
            )
        same = self.duplicates
        if same.groups and not (same.across_parts or same.across_classes):
            yield f"{same.groups} image{'s are' if same.groups > 1 else ' is'} there more than once, all in one part"

    def log_lines(self) -> Iterator[str]:
        """The counts, a line a class that is there, for a log."""
        there = [name for name in self.images if name not in self.lacking]
        for name in there[:_CLASSES]:
            counts = ", ".join(f"{self.images[name][part]} {part}" for part in PARTS)
            yield f"class {printable(name)}: {counts}"
        if len(there) > _CLASSES:
            yield f"and {len(there) - _CLASSES} classes more"
        yield self.in_short()

    def in_short(self) -> str:
        """One line for all."""
        people = "" if self.patients is None else f" of {sum(self.patients.values())} patients"
        counts = ", ".join(f"{self.total(part)} {part}" for part in PARTS)
        return f"own images{people}, divided {self.split}: {counts}"


def summarise(
    place: str,
    how: str,
    classes: Sequence[str],
    items: Sequence[Item],
    split: Split,
    pixels: Sequence[bytes],
    refused: Sequence[Refused],
    ignored: int,
    empty: Sequence[int],
    common_test: frozenset[bytes],
) -> DataSummary:
    """Count everything.

    Args:
        how: the images were divided.
        items: of the images, in their order.
        pixels: a digest of each image as it is used.
        common_test: the same of the common test set.
    """
    part_of = [""] * len(items)
    for part, indices in zip(PARTS, _parts(split), strict=True):
        for i in indices.tolist():
            part_of[i] = part
    counts = Counter((item.label, part) for item, part in zip(items, part_of, strict=True))
    has_patients = bool(items) and all(item.patient is not None for item in items)
    patients = {
        part: len({item.patient for item, here in zip(items, part_of, strict=True) if here == part}) for part in PARTS
    }
    return DataSummary(
        place=place,
        split=how,
        images={name: {part: counts[c, part] for part in PARTS} for c, name in enumerate(classes)},
        patients=patients if has_patients else None,
        refused=tuple(refused),
        ignored=ignored,
        empty=tuple(classes[c] for c in empty),
        duplicates=_duplicates(items, part_of, pixels, common_test),
    )


def pixel_digests(images: NDArray[np.uint8]) -> list[bytes]:
    """Of each of the images [n, C, S, S]."""
    return [hashlib.blake2b(np.ascontiguousarray(image).data, digest_size=16).digest() for image in images]


def _duplicates(
    items: Sequence[Item], part_of: Sequence[str], pixels: Sequence[bytes], common_test: frozenset[bytes]
) -> Duplicates:
    alike: defaultdict[bytes, list[int]] = defaultdict(list)
    for i, digest in enumerate(pixels):
        alike[digest].append(i)
    groups = [group for group in alike.values() if len(group) > 1]
    across_parts = [group for group in groups if len({part_of[i] for i in group}) > 1]
    across_classes = [group for group in groups if len({items[i].label for i in group}) > 1]
    shown = {id(group): group for group in (*across_classes, *across_parts)}
    return Duplicates(
        groups=len(groups),
        across_parts=len(across_parts),
        across_classes=len(across_classes),
        examples=tuple(tuple(items[i].name for i in group[:_LOGGED]) for group in [*shown.values()][:_LOGGED]),
        in_common_test=sum(
            digest in common_test and part != "test" for digest, part in zip(pixels, part_of, strict=True)
        ),
    )


def _parts(split: Split) -> tuple[NDArray[np.int64], ...]:
    return split.train, split.validation, split.test


def _images(count: int, what: str) -> str:
    return f"{count} {what}{'s are' if count > 1 else ' is'}"


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - _CLASSES} more" if len(names) > _CLASSES else ""
    return ", ".join(printable(name) for name in names[:_CLASSES]) + more
