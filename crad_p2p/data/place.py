"""Where the images of one site are: ``folder:PATH``, ``csv:PATH`` or ``npz:PATH``; and how names there are compared.
Free of everything; the service reads it, too.
"""

from __future__ import annotations

import unicodedata
from pathlib import Path

KINDS = ("folder", "csv", "npz")

#: What operating systems leave in folders; and all that begins with a dot.
_LITTER = frozenset({"thumbs.db", "ehthumbs.db", "desktop.ini", "__macosx", "@eadir", "$recycle.bin"})


def split_place(text: str) -> tuple[str, Path]:
    """Kind and path.

    Raises:
        ValueError: it is none of the three.
    """
    kind, colon, path = text.partition(":")
    if not colon or kind not in KINDS or not path:
        allowed = ", ".join(f"{each}:PATH" for each in KINDS)
        meant = "" if colon else f"; did you mean '{kind_of(Path(text))}:{text}'?"
        raise ValueError(f"'{text}' does not say where images are{meant or ';'} allowed are {allowed}")
    return kind, Path(path)


def kind_of(path: Path) -> str:
    """What a path would most likely be, by its name alone."""
    return {".csv": "csv", ".npz": "npz"}.get(path.suffix.lower(), "folder")


def check_place(text: str) -> str:
    """The text as it is; anything else is a ValueError."""
    split_place(text)
    return text


def absolute_place(text: str, base: Path) -> str:
    """The same with an absolute path; a relative one is taken from ``base``."""
    kind, path = split_place(text)
    return f"{kind}:{(base / path).resolve()}"


def plain(text: str) -> str:
    """A name as it is compared: an umlaut of two characters (macOS) is one."""
    return unicodedata.normalize("NFC", text).strip()


def is_litter(name: str) -> bool:
    """Whether a file or directory is none of the user's."""
    return name.startswith(".") or name.casefold() in _LITTER
