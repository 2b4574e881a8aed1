"""What images there are at a place, and of which class, before any of them is read.

Whatever does not fit and could drop or confuse images is an error; a single file that is no image is not.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from crad_p2p.data.own.formats import render_file
from crad_p2p.data.own.rendering import Rendering
from crad_p2p.data.place import plain
from crad_p2p.errors import DataError
from crad_p2p.foreign import printable

PARTS = ("train", "validation", "test")

#: Reads one item: sha256 of its bytes, and the image, uint8 [C, S, S].
Reader = Callable[["Item"], tuple[str, NDArray[np.uint8]]]

#: Class names that a sentence names.
_SHOWN = 20


@dataclass(frozen=True)
class Item:
    """One image that is yet to be read.

    Attributes:
        name: for people, and for the order: its path below the place, or its row in an array.
        label: the class, by its place in the federation's list.
        patient: of whom it is, where that is known.
        part: ``train``, ``validation`` or ``test``, where the site has divided its images itself.
        stamp: what changes when the file does: size and time.
        path: of the file; None for rows of an array.
    """

    name: str
    label: int
    patient: str | None = None
    part: str | None = None
    stamp: tuple[int, ...] = ()
    path: Path | None = None


@dataclass(frozen=True)
class Refused:
    """An image that is not used, and why."""

    name: str
    reason: str


def read_files(rendering: Rendering) -> Reader:
    """A reader of items that are files."""

    def read(item: Item) -> tuple[str, NDArray[np.uint8]]:
        assert item.path is not None
        return render_file(item.path, rendering)

    return read


@dataclass(frozen=True)
class Listing:
    """All that is at a place.

    Attributes:
        place: ``folder:PATH``, ``csv:PATH`` or ``npz:PATH``.
        items: by name.
        refused: files that cannot even be looked at, or belong to no class.
        ignored: hidden files and what operating systems leave behind.
        empty: classes that have a directory without an image.
        reader: makes what reads the items.
    """

    place: str
    items: tuple[Item, ...]
    refused: tuple[Refused, ...] = ()
    ignored: int = 0
    empty: tuple[int, ...] = ()
    reader: Callable[[Rendering], Reader] = field(default=read_files, compare=False)


class Classes:
    """The class names of the federation, by which all labels are matched, never by their order."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self._number = {plain(name): number for number, name in enumerate(names)}

    def number(self, name: str) -> int | None:
        """The class of this name; None if there is none."""
        return self._number.get(plain(name))

    def no_class(self, where: str, name: str, advice: str, others: int = 0) -> DataError:
        """An error that says what the name should have been.

        Args:
            where: whatever has the name, as "peers.csv, row 3: the label".
            others: further names that are no class.
        """
        close = difflib.get_close_matches(plain(name), self._number, n=1)
        meant = f"; did you mean '{printable(close[0])}'?" if close else ""
        more = f" (nor are {others} more)" if others else ""
        return DataError(
            f"{where} '{printable(name)}' is no class of the federation{more}{meant or ';'} its classes (data.classes) "
            f"are {named(self.names)}: {advice}"
        )


def named(names: Iterable[str]) -> str:
    """Names for a sentence, the first ones of many."""
    shown = [printable(name) for name in names]
    more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    return ", ".join(shown[:_SHOWN]) + more


def stamp_of(found: os.stat_result) -> tuple[int, int]:
    """What changes when a file does."""
    return found.st_size, found.st_mtime_ns


def cannot_read(path: Path, error: OSError, what: str = "") -> DataError:
    """An error for a file or directory without which nothing can be said."""
    advice = "see that this user may read it" if isinstance(error, PermissionError) else "mend that"
    if isinstance(error, FileNotFoundError):
        advice = "give the path of what is there"
    return DataError(f"{path}: {what}cannot be read ({error.strerror or error}); {advice}")
