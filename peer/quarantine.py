"""What must not be used: the mark beside what was received, the copy kept for people, and what others say of this peer.

The mark is ``received/ROUND/PEER.refused``: the bytes of a snapshot that came as announced, so that they are not
fetched again, or a line that says why a manifest was refused. The copy is ``quarantine/PEER.safetensors`` with the
manifest ``PEER.json`` and the reason ``PEER.txt``, of each peer the last.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from crad_p2p.durable import write_file
from crad_p2p.manifest import Manifest
from crad_p2p.snapshot import sha256_file


def mark_of(received: Path) -> Path:
    """The mark of a snapshot whose place is ``received``."""
    return received.with_suffix(".refused")


def note_refused(received: Path, reason: str) -> None:
    """Mark a round whose manifest was refused."""
    received.parent.mkdir(exist_ok=True)
    write_file(mark_of(received), f"{reason}\n")  # a new file: the old one may be kept in quarantine under another name


def is_refused(received: Path, manifest: Manifest) -> bool:
    """Whether the bytes of this manifest came as announced, and must not be used. Reads a file of their size."""
    mark = mark_of(received)
    return mark.exists() and mark.stat().st_size == manifest.size and sha256_file(mark) == manifest.sha256


def forget_refused(received: Path, manifest: Manifest) -> None:
    """Take away the mark of an earlier manifest, now that this one is accepted; refused bytes stay refused.

    A line with a reason does not have the size of a snapshot.
    """
    mark = mark_of(received)
    if mark.exists() and mark.stat().st_size != manifest.size:
        mark.unlink()


def keep_aside(folder: Path, received: Path, manifest: Manifest, reason: str) -> str:
    """Keep a copy of a refused snapshot with its manifest and the reason, in place of the last of its peer.

    A disk that cannot take all of it is no reason to stop.

    Returns:
        A part sentence: what is kept, and where; or what is not, and why.
    """
    snapshot = folder / f"{manifest.peer}.safetensors"
    steps: dict[Path, Callable[[], object]] = {
        snapshot: lambda: _copy(received if received.exists() else mark_of(received), snapshot),
        (about := snapshot.with_suffix(".json")): lambda: about.write_bytes(manifest.to_bytes()),
        (words := snapshot.with_suffix(".txt")): lambda: words.write_text(f"round {manifest.round}: {reason}\n"),
    }
    kept: list[str] = []
    lost: dict[str, str | None] = {}  # and why
    for path, write in steps.items():
        try:
            folder.mkdir(exist_ok=True)
            path.unlink(missing_ok=True)
            write()
            kept.append(path.name)
        except OSError as error:
            lost[path.name] = error.strerror
            with suppress(OSError):  # a part of it would pass for the whole
                path.unlink(missing_ok=True)
    if not lost:
        return f"it is kept in {snapshot}"
    why = next(iter(lost.values()))
    if not kept:
        return f"{folder} keeps nothing of it ({why})"
    return f"{folder} keeps {', '.join(kept)} of it, and not {', '.join(lost)} ({why})"


def _copy(source: Path, goal: Path) -> None:
    try:
        os.link(source, goal)
    except OSError:  # not every file system has hard links
        shutil.copyfile(source, goal)


class RefusedBy:
    """``refused-by.json``: of every peer that did not use a round of this one, the last such round and the reason."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def note(self, peer: int, number: int, reason: str) -> bool:
        """Remember a refusal; whether that is news."""
        known = self.all()
        if peer in known and known[peer][0] >= number:
            return False
        document = {str(j): said for j, said in sorted({**known, peer: (number, reason)}.items())}
        write_file(self._path, json.dumps(document) + "\n")
        return True

    def all(self) -> dict[int, tuple[int, str]]:
        """Round and reason, by peer."""
        try:
            tree = json.loads(self._path.read_text())
            return {int(peer): (int(number), str(reason)) for peer, (number, reason) in tree.items()}
        except (FileNotFoundError, ValueError, TypeError, AttributeError):  # damaged: it is for people alone
            return {}
