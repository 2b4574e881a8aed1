"""A fork server: one process that has imported what many others need, and becomes any of them by a fork.

Importing torch takes a second and more than a quarter of a gigabyte of memory in each process; what was imported
before the fork costs nothing more, and its memory is shared. Only for Linux, and for many learners on one machine.

It listens on a Unix socket for packets. Who wants a process connects and sends the arguments and its environment, as
JSON, with four file descriptors: standard input, output and error, and the current directory. The answers are
``{"pid": N}`` or ``{"refused": WHY}``, and, when that process has ended, ``{"status": S}``, negative for a signal.
When the connection is closed before, the process is killed, even if it is stopped: so it never outlives who asked for
it. It does not outlive the fork server either, which after SIGTERM forks no more, and ends when all have ended.

A process so made is what executing the module would give, with these exceptions: limits, priority, umask and session
are those of the fork server, and it ends without ``atexit`` and without waiting for its threads. Libraries read the
environment when they are loaded, so it must be that of the fork server but for names that begin with ``CRAD_``; else
the wish is refused, and who asked executes the module.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from crad_p2p import parent

#: In the environment of a process: the path of the socket of the fork server that it is to use.
NAME = "CRAD_FORK_SERVER"
#: Bytes of the longest packet.
PACKET = 1 << 20
#: Bytes of a command line: those of a learner have four paths.
_ROOM = 16 << 10
#: Connections that wait to be accepted while it imports.
_BACKLOG = 1024
_OWN = "CRAD_"


def is_supported() -> bool:
    """Whether the system offers all that is needed."""
    return sys.platform == "linux"


def command(listener: socket.socket, module: str) -> list[str]:
    """Of a fork server for this module; the process must inherit the listener.

    The module has ``main()``, which is what forked processes do, and may have ``LATER``, names of modules that it will
    need only later, and which are imported as well.
    """
    # The last word only makes room, for the command lines of those that it becomes.
    return [sys.executable, "-P", "-m", "crad_p2p.forking", str(listener.fileno()), module, " " * _ROOM]


@contextlib.contextmanager
def short_address(path: Path) -> Iterator[str]:
    """A Unix socket's path as an address, which may have 108 bytes only, however long the path is."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def listen(path: Path) -> socket.socket:
    """A socket at this path on which the fork server will be asked; for this user alone.

    Raises:
        OSError: the file system has no sockets, or it cannot be written.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        os.fchmod(listener.fileno(), 0o600)  # before there is a file, which so never has other rights
        path.unlink(missing_ok=True)
        with short_address(path) as address:
            listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def wish(arguments: Sequence[str]) -> bytes:
    """The packet that asks for a process with these arguments and the environment of this one."""
    return json.dumps({"arguments": list(arguments), "environment": dict(os.environ)}).encode()


class _Refused(Exception):
    """What was asked for cannot be had of a fork server."""


def _is_closed(connection: socket.socket) -> bool:
    """Whether the other end has left, after what was read."""
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False


class ForkServer:
    """Serves until it is told to end.

    Args:
        run: what a forked process does; it ends when this returns or raises.
        module: whose ``main`` that is, for command lines.
        environment: of this process before anything was imported.
    """

    def __init__(
        self, listener: socket.socket, run: Callable[[], object], module: str, environment: Mapping[str, str]
    ) -> None:
        self._listener = listener
        self._run = run
        self._environment = environment
        self._command = [sys.executable, "-P", "-m", module]
        self._file = getattr(sys.modules.get(module), "__file__", None) or module
        self._line = _CommandLine()
        self._line.write([sys.executable, "-P", "-m", "crad_p2p.forking", module])
        self._pid = os.getpid()
        self._children: dict[int, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        self._is_ending = False

    def serve(self) -> None:
        """Fork whatever is asked for, and tell how it ended."""
        signals, wake = socket.socketpair()
        signals.setblocking(False)
        wake.setblocking(False)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(signals, selectors.EVENT_READ, self._signalled)
        while not self._is_ending or self._children:
            for key, _ in self._selector.select()[:1]:  # what it does may close another that is ready, too
                key.data(key.fileobj)

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):  # who asked may be gone
            connection, _ = listener.accept()
            self._selector.register(connection, selectors.EVENT_READ, self._asked)

    def _signalled(self, signals: socket.socket) -> None:
        if signal.SIGTERM in signals.recv(1 << 16) and not self._is_ending:
            self._is_ending = True
            self._selector.unregister(self._listener)
            self._listener.close()
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            connection = self._children.pop(pid)
            self._answer(connection, status=os.waitstatus_to_exitcode(status))
            self._close(connection)

    def _asked(self, connection: socket.socket) -> None:
        fds: list[int] = []
        try:
            packet, fds, *_ = socket.recv_fds(connection, PACKET, 4, socket.MSG_CMSG_CLOEXEC)
            if not packet or _is_closed(connection):  # who has given up waiting gets no process
                self._close(connection)
                return
            pid = self._fork(json.loads(packet), fds, connection)
        except (_Refused, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            self._answer(connection, refused=str(error))
            self._close(connection)
        else:
            self._children[pid] = connection
            self._selector.modify(connection, selectors.EVENT_READ, self._left)
            self._answer(connection, pid=pid)
        finally:
            for fd in fds:
                os.close(fd)

    def _left(self, connection: socket.socket) -> None:
        """Who asked has closed the connection, or has died; nothing else comes on it."""
        self._selector.unregister(connection)
        for pid, each in self._children.items():
            if each is connection:
                os.kill(pid, signal.SIGKILL)  # not waited for yet, so it still is that process

    def _answer(self, connection: socket.socket, **fields: Any) -> None:
        with contextlib.suppress(OSError):  # who asked may be gone
            connection.sendall(json.dumps(fields).encode())

    def _close(self, connection: socket.socket) -> None:
        if connection in self._selector.get_map():
            self._selector.unregister(connection)
        connection.close()

    def _fork(self, asked: dict[str, Any], fds: list[int], connection: socket.socket) -> int:
        if self._is_ending:
            raise _Refused("the fork server is about to end")
        if len(fds) != 4:
            raise _Refused(f"four file descriptors were expected, and {len(fds)} came")
        arguments, environment = list(map(str, asked["arguments"])), dict(asked["environment"])
        if not all(isinstance(value, str) for value in environment.values()):
            raise _Refused("a value of the environment is no text")
        different = {name for name, _ in environment.items() ^ self._environment.items() if not name.startswith(_OWN)}
        if different:
            raise _Refused(f"the environment differs in {', '.join(sorted(different))}")
        words = [*self._command, *arguments]
        if not self._line.has_room(words):
            raise _Refused("the command line is too long")
        pid = os.fork()
        if pid:
            return pid
        try:
            self._become(words, arguments, environment, fds, _asked_by(connection))
        except BaseException:  # of any kind: nothing of this process may go on as a second fork server
            traceback.print_exc()
        finally:
            os._exit(1)

    def _become(
        self, words: list[str], arguments: list[str], environment: Mapping[str, str], fds: list[int], asked_by: int
    ) -> NoReturn:
        """In the new process: what executing the module would have given."""
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        parent.end_with_parent(signal.SIGKILL)
        if os.getppid() != self._pid:  # it ended before this process could ask
            os._exit(1)
        parent.act_for(asked_by)
        os.fchdir(fds[3])
        for standard, fd in enumerate(fds[:3]):
            os.dup2(fd, standard)
        for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  # the objects that own them live on, unused
            if int(name) > 2:
                with contextlib.suppress(OSError):
                    os.close(int(name))
        gc.enable()
        for name in [name for name in os.environ if name.startswith(_OWN)]:
            del os.environ[name]
        os.environ.update({name: value for name, value in environment.items() if name.startswith(_OWN)})
        sys.argv, sys.orig_argv = [self._file, *arguments], words
        self._line.write(words)
        status = 0
        try:
            self._run()
        except SystemExit as ending:
            status = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
            if isinstance(ending.code, str):
                print(ending.code, file=sys.stderr)
        except BaseException:  # of any kind: as the interpreter does at its end
            traceback.print_exc()
            status = 1
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(status)


class _CommandLine:
    """The words of this process as others see them, in /proc/PID/cmdline; a fork alone would not change them."""

    def __init__(self) -> None:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        self._start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end of proc(5)
        self._room = end - self._start

    def has_room(self, words: Sequence[str]) -> bool:
        return len(_joined(words)) <= self._room

    def write(self, words: Sequence[str]) -> None:
        """Nobody else reads that memory any more: the interpreter has copied its arguments."""
        ctypes.memmove(self._start, _joined(words).ljust(self._room, b"\0"), self._room)


def _joined(words: Sequence[str]) -> bytes:
    return b"".join(os.fsencode(word) + b"\0" for word in words)


def _asked_by(connection: socket.socket) -> int:
    """The process at the other end."""
    pid = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)[:4]
    return int.from_bytes(pid, sys.byteorder)


def _is_alone() -> bool:
    """Whether this process has one thread: others would not be there after a fork, and what they hold stays held."""
    return len(list(Path("/proc/self/task").iterdir())) == 1


def main() -> None:
    """Entry point of the process; see :func:`command`."""
    parent.end_with_named_parent()
    environment = dict(os.environ)
    listener = socket.socket(fileno=int(sys.argv[1]))
    gc.disable()  # it would write to every object, and so end the sharing of their memory
    module = importlib.import_module(sys.argv[2])
    for name in getattr(module, "LATER", ()):
        with contextlib.suppress(ImportError):  # another version may have it elsewhere
            importlib.import_module(name)
    if not (pid := os.fork()):  # some libraries end their threads before a fork, and begin them anew when needed
        os._exit(0)
    os.waitpid(pid, 0)
    if not _is_alone():
        sys.exit(f"importing {sys.argv[2]} has begun threads; it cannot be forked")
    gc.freeze()
    ForkServer(listener, module.main, sys.argv[2], environment).serve()
    os._exit(0)  # at once: nothing here has to be put in order


if __name__ == "__main__":
    main()
