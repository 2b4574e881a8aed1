"""A process that a fork server made (``crad_p2p.forking``), with the face of one of asyncio's subprocesses."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import signal
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from crad_p2p import forking
from peer.waiting import within

#: Seconds in which a fork server answers; at first it imports, together with everything else that starts.
_PATIENCE = 120.0


class Forked:
    """One process, which ends with this one at the latest."""

    def __init__(
        self, pid: int, connection: socket.socket, stdin: asyncio.WriteTransport, stdout: asyncio.StreamReader
    ) -> None:
        self.pid = pid
        self.stdin = stdin
        self.stdout = stdout
        self._connection = connection
        self._ended = asyncio.ensure_future(self._hear_the_end())

    @classmethod
    async def start(cls, path: Path, arguments: Sequence[str], *, limit: int) -> Forked:
        """Ask for it.

        Args:
            path: of the fork server's socket.
            arguments: of its command line; standard error and the current directory are those of this process.
            limit: bytes of the longest line of its standard output.

        Raises:
            OSError: there is no fork server, or it does not do it.
        """
        loop = asyncio.get_running_loop()
        with contextlib.ExitStack() as undo, contextlib.ExitStack() as done:
            connection = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            connection.setblocking(False)
            with forking.short_address(path) as address:
                connection.connect(address)  # never waits: it is accepted later
            input_there, input_here = os.pipe()
            done.callback(os.close, input_there)
            stdin_file = undo.enter_context(open(input_here, "wb", 0))  # noqa: PTH123
            output_here, output_there = os.pipe()
            done.callback(os.close, output_there)
            stdout_file = undo.enter_context(open(output_here, "rb", 0))  # noqa: PTH123
            folder = os.open(".", os.O_PATH | os.O_DIRECTORY)
            done.callback(os.close, folder)
            socket.send_fds(connection, [forking.wish(arguments)], [input_there, output_there, 2, folder])
            try:
                answer = await within(_PATIENCE, loop.sock_recv(connection, forking.PACKET))
            except TimeoutError:
                raise OSError(errno.ETIMEDOUT, f"the fork server has not answered for {_PATIENCE:g} s") from None
            if not answer:
                raise OSError(errno.ECONNRESET, "the fork server has ended")
            said = json.loads(answer)
            if "pid" not in said:
                raise OSError(errno.EPERM, said["refused"])
            stdout = asyncio.StreamReader(limit=limit)
            await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdout), stdout_file)
            stdin, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, stdin_file)
            undo.pop_all()
        return cls(said["pid"], connection, stdin, stdout)

    async def wait(self) -> int:
        """Exit status, negative for a signal."""
        return await asyncio.shield(self._ended)

    def kill(self) -> None:
        """End it by force."""
        with contextlib.suppress(OSError):  # it may have ended just now
            self._connection.shutdown(socket.SHUT_WR)

    async def _hear_the_end(self) -> int:
        loop = asyncio.get_running_loop()
        with self._connection:
            try:
                said = await loop.sock_recv(self._connection, forking.PACKET)
            except OSError:
                said = b""
        # Without a word the fork server itself has ended, and the system kills all that it has made.
        status: dict[str, Any] = json.loads(said) if said else {"status": -signal.SIGKILL}
        return int(status["status"])
