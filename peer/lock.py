"""A lock file: one process at a time works in a directory, and whoever is refused learns which process does."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from crad_p2p.errors import AlreadyRunningError


class Lock:
    """Held from :meth:`take` until :meth:`release`, or until the process ends in whatever way."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1

    def take(self, what: str, advice: str) -> None:
        """Take the lock.

        Raises:
            AlreadyRunningError: "``what`` (process N); ``advice``".
            OSError: the file cannot be made.
        """
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._fd, 32, 0).decode() or "unknown"
            self.release()
            raise AlreadyRunningError(f"{what} (process {holder}); {advice}") from None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, str(os.getpid()).encode(), 0)

    def holder(self) -> str | None:
        """The process that holds it, or "unknown"; None if nobody does. Creates nothing.

        It looks by taking the lock for an instant; a peer that starts in that very instant is refused.

        Raises:
            OSError: the file cannot be read.
        """
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return os.pread(fd, 32, 0).decode() or "unknown"
        finally:
            os.close(fd)
        return None

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
