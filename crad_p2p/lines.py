"""Lines for people: on a terminal broken between words, for programs whole."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from typing import Final, TextIO

#: A sha256 as certificates are compared by, at the end of a line: too long for a narrow terminal.
_FINGERPRINT: Final = re.compile(r"(.*?)((?:[0-9A-F]{2}:){16})((?:[0-9A-F]{2}:){15}[0-9A-F]{2})")
#: Lines to be copied as they are.
_COMMANDS: Final = ("crad-mesh ", "crad-peer ")


def fold(text: str, width: int | None) -> str:
    """A line as one or more of at most so many characters, as far as words allow; None leaves it whole.

    What follows is indented as the first is. A fingerprint is halved, one half below the other. Commands stay whole.
    """
    rest = text.lstrip(" ")
    if width is None or len(text) <= width or rest.startswith(_COMMANDS):
        return text
    if parts := _FINGERPRINT.fullmatch(text):
        return f"{parts[1]}{parts[2]}\n{' ' * len(parts[1])}{parts[3]}"
    indent = " " * (len(text) - len(rest))
    lines = textwrap.wrap(
        rest,
        max(width, 20),
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines)


def width_of(stream: TextIO) -> int | None:
    """Characters in a line of a terminal; None if it is none."""
    return shutil.get_terminal_size().columns if stream.isatty() else None


def say(text: str) -> None:
    """Print a line."""
    print(fold(text, width_of(sys.stdout)))
