"""Files that are there whole or not at all, also after a power cut."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def write_file(path: Path, content: bytes | str, mode: int = 0o644, *, may_replace: bool = True) -> None:
    """Put a file in place in one durable step: what was there before or all of this, never a part.

    Nobody can read it meanwhile who could not read it afterwards. One thread of one process
    writes a file at a time.

    Args:
        content: text is written as UTF-8.
        mode: of the file, from its first byte on, less what the umask forbids.
        may_replace: False for what must not be lost, as a key: a file that is there stays.

    Raises:
        FileExistsError: it is there, and must not be replaced.
        OSError: it could not be written.
    """
    partial = path.with_name(path.name + ".partial")
    partial.unlink(missing_ok=True)  # of a process that was killed
    fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with os.fdopen(fd, "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(fd)
    if may_replace:
        rename(partial, path)
    else:
        _name_anew(partial, path)
        sync(path.parent)


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
