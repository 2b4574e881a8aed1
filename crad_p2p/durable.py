"""Files that are there whole or not at all, also after a power cut."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


def write_file(path: Path, content: bytes | str, mode: int = 0o644, *, may_replace: bool = True) -> None:
    """Put a file in place in one durable step: what was there before or all of this, never a part.

    Nobody can read it meanwhile who could not read it afterwards. What may be replaced is written
    by one thread of one process at a time; of what must not be replaced, the first of several wins.

    Args:
        content: text is written as UTF-8.
        mode: of the file, from its first byte on, less what the umask forbids.
        may_replace: False for what must not be lost, as a key: a file that is there stays.

    Raises:
        FileExistsError: it is there, and must not be replaced.
        OSError: it could not be written.
    """
    whole = content.encode() if isinstance(content, str) else content
    if may_replace:
        with replacing(path, mode) as file:
            file.write(whole)
        return
    partial, fd = _begin_among_others(path, mode)
    with os.fdopen(fd, "wb") as file:
        file.write(whole)
        file.flush()
        os.fsync(fd)
        _name_anew(partial, path)  # before its lock is gone
    sync(path.parent)


@contextmanager
def replacing(path: Path, mode: int = 0o644) -> Iterator[BinaryIO]:
    """A file to be filled piece by piece, which is put in place as :func:`write_file` does once the block has ended;
    where that raises, what was there before stays.

    Raises:
        OSError: it could not be written.
    """
    partial, fd = _begin(path, mode)
    with os.fdopen(fd, "wb") as file:
        yield file
        file.flush()
        os.fsync(fd)
    rename(partial, path)


def rename(source: Path, goal: Path) -> None:
    """Rename within a directory, durably; what has the new name is replaced."""
    source.replace(goal)
    sync(goal.parent)  # where the name stands


def sync(path: Path) -> None:
    """Make a file's bytes, or a directory's names, durable.

    Raises:
        OSError: the disk failed, or it is not there.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _begin(path: Path, mode: int) -> tuple[Path, int]:
    """A file to write to, open, in place of what a process that was killed has left."""
    partial = path.with_name(path.name + ".partial")
    partial.unlink(missing_ok=True)
    return partial, _open_new(partial, mode)


def _begin_among_others(path: Path, mode: int) -> tuple[Path, int]:
    """The same with a name of its own. The lock on it says that it is not left of a process that was killed."""
    left = re.compile(rf"{re.escape(path.name)}(\.[0-9]+-[0-9a-f]{{8}})?\.partial")
    for each in os.scandir(path.parent):
        if left.fullmatch(each.name):
            _remove_unless_locked(Path(each.path))
    while True:
        partial = path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}.partial")
        fd = _open_new(partial, mode)
        with suppress(OSError):  # not every file system has locks, and then none removes what another has left
            fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink:
            return partial, fd
        os.close(fd)  # another has removed it before it was locked


def _remove_unless_locked(partial: Path) -> None:
    try:
        fd = os.open(partial, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # gone, or of somebody else
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        partial.unlink(missing_ok=True)
    except OSError:
        pass
    finally:
        os.close(fd)


def _open_new(path: Path, mode: int) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)


def _name_anew(partial: Path, path: Path) -> None:
    """Give a file a name that nothing has yet: unlike a rename, a link never replaces."""
    try:
        os.link(partial, path)
        is_new = True
    except FileExistsError:
        is_new = False
    except OSError:  # not every file system has hard links
        is_new = not os.path.lexists(path)
        if is_new:
            partial.rename(path)
    partial.unlink(missing_ok=True)
    if not is_new:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
