"""``lineage.jsonl``: the manifests of rounds that are not kept any more, a line each; only ever appended to.

Durable before the files that they come from are deleted, so after a kill at any moment each is here, there, or both.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from crad_p2p.durable import sync

FILE: Final = "lineage.jsonl"
_BLOCK: Final = 1 << 16


class Lineage:
    """The file of one peer. Any thread may append."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()

    def mend(self) -> None:
        """Cut off the half line that a killed process has left: what it was to hold still lies where it was.

        Raises:
            OSError: the file cannot be read or written.
        """
        if self._path.exists():
            self._write(b"")

    def append(self, documents: Iterable[bytes]) -> None:
        """Add manifests, JSON documents without a line break, and make them durable: one write for all.

        Raises:
            OSError: the disk is full or failed; what came to be in the file of this is cut off by the next call.
        """
        if text := b"".join(document + b"\n" for document in documents):
            self._write(text)

    def _write(self, text: bytes) -> None:
        with self._lock:
            is_new = not self._path.exists()
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            with os.fdopen(fd, "r+b") as file:
                size = file.seek(0, os.SEEK_END)
                if (end := _end_of_lines(fd, size)) < size:
                    file.truncate(end)
                file.seek(end)
                file.write(text)
                file.flush()
                os.fsync(fd)
            if is_new:
                sync(self._path.parent)  # the name, too


def _end_of_lines(fd: int, size: int) -> int:
    """Bytes up to the last line break, looked for from the end."""
    end = size
    while end > 0:
        start = max(0, end - (1 if end == size else _BLOCK))  # as a rule the last byte is one
        found = os.pread(fd, end - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0
