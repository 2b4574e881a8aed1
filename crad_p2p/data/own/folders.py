"""A directory with one directory a class, at any depth below that."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from crad_p2p.data.own.listing import Classes, Item, Listing, Refused, cannot_read, named, stamp_of
from crad_p2p.data.place import is_litter, plain
from crad_p2p.errors import DataError


@dataclass
class _Found:
    root: Path
    items: list[Item] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)
    ignored: int = 0


def list_folder(place: str, root: Path, classes: Classes) -> Listing:
    """List it. Links are followed; files that are no images are found out when they are read.

    Raises:
        DataError: a directory that cannot be read, or is no class, or there is no class at all.
    """
    found = _Found(root)
    directories: list[tuple[int, Path]] = []
    strangers: list[str] = []
    for entry in _entries(root, found):
        if not _is_directory(entry):
            found.refused.append(Refused(plain(entry.name), "lies in no directory of a class"))
        elif (label := classes.number(entry.name)) is None:
            strangers.append(entry.name)
        else:
            directories.append((label, Path(entry.path)))
    if strangers:
        raise classes.no_class(
            f"{root}: the directory",
            strangers[0],
            "rename it, or move it away; where directories are parts and not classes, list the images in a csv file",
            len(strangers) - 1,
        )
    if not directories:
        raise DataError(
            f"{root}: holds no directory of a class; make one for each class of which there are images, named as in "
            f"data.classes: {named(classes.names)}"
        )
    empty = []
    for label, directory in directories:
        before = len(found.items) + len(found.refused)
        _walk(directory, label, found, (_identity(root), _identity(directory)))
        if len(found.items) + len(found.refused) == before:
            empty.append(label)
    found.items.sort(key=lambda item: item.name)
    with_images = {item.label for item in found.items}
    return Listing(
        place,
        tuple(found.items),
        tuple(sorted(found.refused, key=lambda each: each.name)),
        found.ignored,
        tuple(sorted({*empty} - with_images)),
    )


def _walk(directory: Path, label: int, found: _Found, above: tuple[tuple[int, int], ...]) -> None:
    for entry in _entries(directory, found):
        path = Path(entry.path)
        name = plain(path.relative_to(found.root).as_posix())
        try:
            what = path.stat()
        except OSError as error:
            is_link = "is a link to what is not there" if entry.is_symlink() else f"cannot be read ({error.strerror})"
            found.refused.append(Refused(name, is_link))
            continue
        if stat.S_ISDIR(what.st_mode):
            here = (what.st_dev, what.st_ino)
            if here in above:
                found.refused.append(Refused(name, "is a link to a directory above it"))
            else:
                _walk(path, label, found, (*above, here))
        elif stat.S_ISREG(what.st_mode):
            found.items.append(Item(name, label, stamp=stamp_of(what), path=path))
        else:
            found.refused.append(Refused(name, "is no regular file"))


def _entries(directory: Path, found: _Found) -> Iterator[os.DirEntry[str]]:
    """What is in a directory, by name, without litter.

    Raises:
        DataError: it cannot be listed: nobody knows how many images that would leave out.
    """
    try:
        entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
    except OSError as error:
        raise cannot_read(directory, error, "the directory of images ") from None
    for entry in entries:
        if is_litter(entry.name):
            found.ignored += 1
        else:
            yield entry


def _is_directory(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


def _identity(directory: Path) -> tuple[int, int]:
    try:
        found = directory.stat()
    except OSError as error:
        raise cannot_read(directory, error, "the directory of images ") from None
    return found.st_dev, found.st_ino
