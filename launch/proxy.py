"""A TCP proxy that behaves like a bad link: slow, silent, broken or lying. What it does can be changed at any time.

    async with Proxy("127.0.0.1:7400") as link:      # dial 127.0.0.1:{link.port} in place of the target
        link.down.bandwidth = 20_000                 # bytes a second towards those who dial
        link.cut()                                   # a black hole, until
        link.heal()

It relays bytes and knows nothing of what they mean, so the same faults can be put before any pair of peers.
"""

from __future__ import annotations

import asyncio
import math
import random
import socket
import struct
from contextlib import suppress
from typing import Self

#: Bytes read at once.
_READ_BYTES = 1 << 16
#: Into which a slow link divides its bytes.
_PIECES_A_SECOND = 20
#: Pieces under way on a link with a delay; more is left with the sender.
_UNDER_WAY = 256


class Flow:
    """One direction of the link. The settings may be changed at any time, and hold for bytes read after that.

    Attributes:
        delay: seconds that every byte is under way.
        bandwidth: bytes a second, all connections together; None for as many as come.
        swallows: takes every byte and passes none on, nor the end of a connection. A connection that has lost bytes
            stays swallowed in this direction: what follows a gap is never passed on.
        flips: probability, below 1, that one bit of a byte is flipped; the seed decides which.
        truncate: bytes that still pass; a connection that has more is closed after them, and the limit is gone.
        received, passed, flipped: bytes so far.
    """

    def __init__(self, seed: str) -> None:
        self.received = self.passed = self.flipped = 0
        self._random = random.Random(seed)
        self._line_is_free = 0.0
        self.heal()

    def heal(self) -> None:
        self.delay = 0.0
        self.bandwidth: float | None = None
        self.swallows = False
        self.flips = 0.0
        self.truncate: int | None = None

    def pieces(self, data: bytes) -> list[bytes]:
        """On a slow link bytes go evenly."""
        if self.bandwidth is None or self.swallows:
            return [data]
        size = max(1, int(self.bandwidth / _PIECES_A_SECOND))
        return [data[start : start + size] for start in range(0, len(data), size)]

    async def pace(self, size: int) -> None:
        """Wait until the line has taken so many bytes."""
        if self.bandwidth is not None and not self.swallows:
            now = asyncio.get_running_loop().time()
            self._line_is_free = max(self._line_is_free, now) + size / self.bandwidth
            await asyncio.sleep(self._line_is_free - now)

    def spoil(self, data: bytes) -> bytes:
        """The bytes with some of their bits flipped."""
        if not self.flips:
            return data
        spoiled, place = bytearray(data), self._gap()
        while place < len(spoiled):
            spoiled[place] ^= 1 << self._random.randrange(8)
            self.flipped += 1
            place += 1 + self._gap()
        return bytes(spoiled)

    def _gap(self) -> int:
        """Bytes that stay right before the next one that does not: geometric, so that no byte need be drawn for."""
        return int(math.log(1.0 - self._random.random()) / math.log1p(-self.flips))


class Proxy:
    """Listens on a loopback port that the system chooses, and relays to ``target``, HOST:PORT.

    ``up`` is the direction from those who dial to the target, ``down`` the way back; a link that is half open has one
    of them swallow. ``target`` may be changed; new connections go there. ``seed`` is that of the bit flips.
    """

    def __init__(self, target: str, *, seed: int = 0) -> None:
        self.target = target
        self.up, self.down = Flow(f"{seed} up"), Flow(f"{seed} down")
        self.accepted = 0
        self.port = 0
        self._listener: socket.socket | None = None
        self._connections: dict[asyncio.Task[None], list[socket.socket]] = {}

    async def __aenter__(self) -> Self:
        self._reserved = _bound(0)  # holds the port while nobody listens on it
        self.port = self._reserved.getsockname()[1]
        self.accept()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.refuse()
        self.reset()
        if self._connections:
            await asyncio.wait(self._connections)
        self._reserved.close()

    @property
    def present(self) -> int:
        """Number of connections that have not ended, dead ones included."""
        return len(self._connections)

    def cut(self) -> None:
        """A black hole: connections are accepted and kept, and nothing comes through or ends, in both directions."""
        self.up.swallows = self.down.swallows = True

    def heal(self) -> None:
        """A good link again. Connections that have lost bytes stay dead: their ends have to find that out."""
        self.up.heal()
        self.down.heal()
        self.accept()

    def reset(self) -> None:
        """Break all present connections, with a TCP reset to both ends."""
        for task, ends in self._connections.items():
            _reset_on_close(ends)
            task.cancel()

    def refuse(self) -> None:
        """Listen no more; present connections stay."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None

    def accept(self) -> None:
        """Listen again."""
        if self._listener is None:
            self._listener = _bound(self.port)
            self._listener.listen()
            asyncio.get_running_loop().add_reader(self._listener, self._take, self._listener)

    # --- inside ----------------------------------------------------------------------------------------------------

    def _take(self, listener: socket.socket) -> None:
        with suppress(OSError):  # whoever dialled has gone again
            near, _ = listener.accept()
            self.accepted += 1
            task = asyncio.create_task(self._carry(near, far := socket.socket()))
            self._connections[task] = [near, far]
            task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        for end in self._connections.pop(task):
            end.close()
        if not task.cancelled():
            task.result()  # nothing is expected; an error of this module must not go unseen

    async def _carry(self, near: socket.socket, far: socket.socket) -> None:
        """One connection, to its end."""
        for end in (near, far):
            end.setblocking(False)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            if self.up.swallows:  # what begins in a black hole never reaches the target
                await self._relay(self.up, near, far, is_dead=True)
                return
            host, _, port = self.target.rpartition(":")
            await asyncio.get_running_loop().sock_connect(far, (host, int(port)))
            async with asyncio.TaskGroup() as both:
                both.create_task(self._relay(self.up, near, far))
                both.create_task(self._relay(self.down, far, near))
        except* OSError:  # one end is broken, so let the other be
            _reset_on_close([near, far])
        except* _TruncatedError:
            pass

    async def _relay(self, flow: Flow, source: socket.socket, sink: socket.socket, *, is_dead: bool = False) -> None:
        """Until the source ends."""
        loop = asyncio.get_running_loop()
        line: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_UNDER_WAY)
        async with asyncio.TaskGroup() as group:
            delivery = group.create_task(_deliver(flow, line, sink))
            data = b"?"
            while data:
                try:
                    data = await loop.sock_recv(source, _READ_BYTES)
                except OSError:
                    if not (is_dead or flow.swallows):
                        raise
                    data = b""
                flow.received += len(data)
                for piece in flow.pieces(data):
                    await flow.pace(len(piece))
                    is_dead = is_dead or flow.swallows  # also if the cut came while the line was busy
                    if not is_dead:
                        await line.put((loop.time() + flow.delay, flow.spoil(piece)))
                        if not flow.delay:
                            await line.join()  # nothing is under way, so the sender feels a slow receiver
            if is_dead or flow.swallows:
                delivery.cancel()
            else:
                await line.put((loop.time() + flow.delay, b""))


async def _deliver(flow: Flow, line: asyncio.Queue[tuple[float, bytes]], sink: socket.socket) -> None:
    """Pass on what has been under way for long enough."""
    loop = asyncio.get_running_loop()
    data = b"?"
    while data:
        due, data = await line.get()
        await asyncio.sleep(due - loop.time())
        passing = data if flow.truncate is None else data[: flow.truncate]
        await loop.sock_sendall(sink, passing)
        flow.passed += len(passing)
        if len(passing) < len(data):
            flow.truncate = None
            raise _TruncatedError
        if flow.truncate is not None:
            flow.truncate -= len(passing)
        line.task_done()
    sink.shutdown(socket.SHUT_WR)


class _TruncatedError(Exception):
    """Enough bytes have passed."""


def _bound(port: int) -> socket.socket:
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # several of this process, on its own port
    bound.bind(("127.0.0.1", port))
    bound.setblocking(False)
    return bound


def _reset_on_close(ends: list[socket.socket]) -> None:
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
