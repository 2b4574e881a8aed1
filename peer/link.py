"""The link to one other peer: says hello, watches it, and fetches what it has published. Reconnects until stopped."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from crad_p2p.errors import IncompleteError, PeersDisagreeError
from crad_p2p.failpoints import fail_point
from crad_p2p.federation import Federation
from crad_p2p.foreign import printable
from crad_p2p.manifest import Manifest
from crad_p2p.snapshot import DamagedFileError, SnapshotError
from peer._proto.crad.v1 import peer_pb2, peer_pb2_grpc
from peer.channels import LARGEST_CHUNK_BYTES, Waits, dial
from peer.hello import describe_disagreement, greeting
from peer.intake import Intake
from peer.turns import Slots, Turns
from peer.waiting import within

logger = logging.getLogger(__name__)

_FIRST_DELAY = 0.1
#: Seconds between two tries. An attempt to connect may have taken four when the link heals, and traffic resumes within
#: five; but who sends what must not be used is not asked again so soon.
_LONGEST_DELAY, _LONGEST_DELAY_AFTER_DAMAGE = 0.8, 5.0
#: The peer's own word, or a connection of which gRPC knows that it is lost.
_CONNECTION_IS_FINE = (
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.UNAVAILABLE,
)


class Link:
    """One other peer, seen from here.

    Args:
        on_hello: called with every answer to the greeting, before the link counts as up; what it raises ends
            :meth:`watch`.
        on_state: called with every state the peer sends.
        on_connection: called with True when the link comes up and False when it goes down.
        slots: limits the transfers that run at the same time; held while one runs, and not between two attempts, so
            that peers which are away do not keep others from being served.
    """

    def __init__(
        self,
        federation: Federation,
        own_id: int,
        peer: int,
        waits: Waits,
        *,
        on_hello: Callable[[int, peer_pb2.HelloReply], None] = lambda *_: None,
        on_state: Callable[[int, peer_pb2.PeerState], None] = lambda *_: None,
        on_connection: Callable[[int, bool], None] = lambda *_: None,
        slots: Slots | None = None,
    ) -> None:
        self.peer = peer
        self.bytes_received = 0
        self.transfer_seconds = 0.0
        self._slots = slots or Slots(1, math.inf)
        self._turns = Turns()
        self._address = federation.peer(peer).address
        self._federation = federation
        self._own_id = own_id
        self._waits = waits
        self._on_hello = on_hello
        self._on_state = on_state
        self._on_connection = on_connection
        self._has_agreed = False
        self._difference: str | None = None  # found in the last greeting
        self._last_heard = 0.0  # when something came, on whatever call
        self._line = _Line(self._address)

    async def close(self) -> None:
        await self._line.channel.close()

    async def watch(self) -> None:
        """Follow the peer's state; returns when it has left for good.

        Raises:
            PeersDisagreeError: it runs another federation or software.
        """
        is_up: bool | None = None
        async for attempt in _attempts():
            try:
                self._on_hello(self.peer, await self._greet())
                if is_up is False:  # the log has a line that it was not
                    logger.info("peer %d at %s: connected", self.peer, self._address)
                is_up = True
                self._on_connection(self.peer, True)
                attempt.succeeded()
                async with self._call() as stub:
                    if await self._follow(stub):
                        self._on_connection(self.peer, False)
                        return
                reason = "it ended the stream"
            except _CallError as error:
                reason = str(error)
            if is_up is not False:  # not once for every attempt that fails
                is_up = False
                self._on_connection(self.peer, False)
            attempt.failed(logger, f"peer {self.peer} at {self._address}: {reason}; trying again")

    async def hello(self) -> peer_pb2.HelloReply:
        """The answer to the greeting, asked for until it comes.

        Raises:
            PeersDisagreeError: it runs another federation or software.
        """
        async for attempt in _attempts():
            try:
                return await self._greet()
            except _CallError as error:
                attempt.failed(logger, f"peer {self.peer} at {self._address}: {error}; trying again")
        raise AssertionError("attempts never end")

    async def manifest(self, number: int, intake: Intake, owner: int | None = None) -> Manifest:
        """A manifest of the peer, or one of ``owner`` that the peer keeps; asked for until it is there and right.

        Raises:
            RoundGoneError: the peer does not keep that round (any more).
        """
        owner = self.peer if owner is None else owner
        request = peer_pb2.GetManifestRequest(peer=owner, round=number)
        async for attempt in _attempts():
            try:
                async with self._call() as stub:
                    reply = await self._answer(stub.GetManifest(request, timeout=self._waits.connect))
                return intake.manifest(reply.document, owner, number, sha256=reply.manifest_sha256)
            except _CallError as error:
                is_repeated = attempt.failed(
                    logger,
                    f"manifest of round {number} of peer {owner}: {error}; trying again",
                    level=logging.DEBUG if error.code == grpc.StatusCode.NOT_FOUND else logging.INFO,  # told below
                )
                self._raise_if_gone(error, number, is_repeated=is_repeated)
            except SnapshotError as error:
                attempt.failed(
                    logger,
                    f"manifest of round {number} of peer {owner} refused: {error}; trying again",
                    longest=_LONGEST_DELAY_AFTER_DAMAGE,
                )
        raise AssertionError("attempts never end")

    async def snapshot(self, manifest: Manifest, path: Path, intake: Intake, *, tries: float = math.inf) -> None:
        """Fetch a snapshot to ``path``, resumed where it was cut, and check it; repeated until it is right.

        Raises:
            SnapshotError: it came as announced, and must not be used; ``path`` has the suffix ``.refused`` then.
            DamagedFileError: it came damaged, or its owner found it so, as many times as ``tries`` says.
            RoundGoneError: the peer does not keep that round (any more).
        """
        partial = path.with_suffix(".partial")
        what = f"snapshot of round {manifest.round} of peer {manifest.peer}"
        was_damaged = False
        async for attempt in _attempts():
            try:
                async with (
                    self._turns.take(manifest.round),
                    self._slots.take(self.peer),
                    self._timed(),
                    self._call() as stub,
                ):
                    await self._download(stub, manifest, partial, recheck=was_damaged)
                await self._check(intake, partial, manifest)
                fail_point("snapshot-received", manifest.round)
                partial.rename(path)
                fail_point("snapshot-renamed", manifest.round)
                return
            except DamagedFileError as error:
                partial.unlink(missing_ok=True)
                was_damaged = True
                tries -= 1
                if tries <= 0:
                    raise
                attempt.failed(
                    logger,
                    f"{what} refused: {error}; fetching it again from the start",
                    longest=_LONGEST_DELAY_AFTER_DAMAGE,
                )
            except _CallError as error:
                if error.code == grpc.StatusCode.DATA_LOSS:  # its owner has looked, and will not send it
                    tries -= 1
                    if tries <= 0:
                        raise DamagedFileError(str(error)) from None
                at = _size(partial)
                was_damaged = was_damaged and not at  # what has come since is not known to be
                how = f"cut at byte {at}: {error}; resuming" if at else f"did not come: {error}; asking again"
                is_repeated = attempt.failed(logger, f"{what} {how}")
                self._raise_if_gone(error, manifest.round, is_repeated=is_repeated)

    # --- inside ----------------------------------------------------------------------------------------------------

    async def _greet(self) -> peer_pb2.HelloReply:
        async with self._call() as stub:
            call = stub.Hello(greeting(self._federation, self._own_id), timeout=self._waits.connect)
            reply: peer_pb2.HelloReply = await self._answer(call)
            self._refuse_difference(reply)
        return reply

    def _refuse_difference(self, reply: peer_pb2.HelloReply) -> None:
        if reply.peer == self.peer:
            difference = describe_disagreement(reply, self._federation, self._own_id)
        else:
            difference = f"{self._address} should be peer {self.peer}, and answers as peer {reply.peer}"
        is_repeated, self._difference = difference == self._difference, difference
        if difference is None:
            self._has_agreed = True
        elif self._has_agreed:
            # It was restarted with other settings. It will end by itself; nothing is wrong here.
            raise _CallError(f"it was started with other settings: {difference}")
        elif not is_repeated:
            raise _CallError(f"{difference}; asking again, since the answer may have been damaged on the way")
        else:
            raise PeersDisagreeError(
                f"peers {self._own_id} and {self.peer} were started with different settings: {difference}; give "
                f"both the same federation file and software version"
            )

    @asynccontextmanager
    async def _call(self) -> AsyncIterator[Any]:
        """The stub for one call; whatever ends it early is turned into :class:`_CallError`.

        A failure that is neither the peer's own word nor a connection known to be lost can be that of a connection
        that is out of step, and will be for ever: the next call gets another one. What still moves on this one goes on.
        """
        line = self._line
        line.calls += 1
        try:
            yield line.stub
        except grpc.aio.AioRpcError as error:
            if error.code() not in _CONNECTION_IS_FINE:
                self._redial(line)
            name = error.code().name.lower().replace("_", " ")
            raise _CallError(f"{name} ({_in_short(error.details() or '')})", error.code()) from None
        except TimeoutError:
            self._redial(line)
            raise _CallError(f"nothing came for {self._waits.no_progress:g} s") from None
        except _CallError:
            self._redial(line)
            raise
        finally:
            line.calls -= 1
            if line is not self._line and not line.calls:
                await line.channel.close()

    @asynccontextmanager
    async def _timed(self) -> AsyncIterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self.transfer_seconds += time.monotonic() - start

    def _redial(self, line: _Line) -> None:
        if line is self._line:
            self._line = _Line(self._address)

    async def _answer(self, call: Awaitable[Any]) -> Any:
        """What the peer answers. gRPC gives None for bytes that are no message of the right kind."""
        answer = await call
        if answer is None:
            raise _CallError("its answer cannot be read")
        self._last_heard = asyncio.get_running_loop().time()
        return answer

    async def _next(self, call: Any, sign_of_life: Callable[[], float] | None = None) -> Any:
        return await within(self._waits.no_progress, self._answer(call.read()), sign_of_life)

    async def _follow(self, stub: Any) -> bool:
        """Pass on every state of the peer; whether it has said that it leaves."""
        call = stub.Watch(peer_pb2.WatchRequest())
        try:
            # On a slow link that is busy with a transfer, states come late, and the transfer shows that it is alive.
            while (state := await self._next(call, sign_of_life=lambda: self._last_heard)) is not grpc.aio.EOF:
                self._on_state(self.peer, state)
                if state.leaving:
                    return True
        finally:
            call.cancel()
        return False

    @staticmethod
    async def _check(intake: Intake, partial: Path, manifest: Manifest) -> None:
        try:
            await asyncio.to_thread(intake.snapshot, partial, manifest)
        except DamagedFileError:
            raise
        except SnapshotError:
            partial.rename(partial.with_suffix(".refused"))  # kept aside as evidence
            raise

    async def _download(self, stub: Any, manifest: Manifest, partial: Path, *, recheck: bool) -> None:
        """Append to ``partial`` what is missing.

        Raises:
            DamagedFileError: the stream has a gap or is longer than announced.
        """
        offset = _size(partial)
        request = peer_pb2.GetSnapshotRequest(
            peer=manifest.peer, round=manifest.round, sha256=manifest.sha256, offset=offset, recheck=recheck
        )
        call = stub.GetSnapshot(request)
        try:
            with partial.open("ab") as file:
                while (chunk := await self._next(call)) is not grpc.aio.EOF:
                    if chunk.offset != offset or not 0 < len(chunk.data) <= LARGEST_CHUNK_BYTES:
                        raise DamagedFileError(
                            f"chunk of {len(chunk.data)} bytes at {chunk.offset}, expected one at {offset}"
                        )
                    offset += len(chunk.data)
                    if offset > manifest.size:
                        raise DamagedFileError(f"stream goes on beyond the {manifest.size} bytes of the manifest")
                    file.write(chunk.data)
                    self.bytes_received += len(chunk.data)
        finally:
            call.cancel()

    def _raise_if_gone(self, error: _CallError, number: int, *, is_repeated: bool) -> None:
        """A peer that answers so once may have read a damaged request."""
        if error.code == grpc.StatusCode.NOT_FOUND and is_repeated:
            raise RoundGoneError(
                f"round {number} is needed here of peer {self.peer}, but it answers: {error}; one of the two "
                f"lost its latest rounds (an older state directory, perhaps): start that one with --recover"
            )


class _Line:
    """One channel to the peer, and how many calls are on it."""

    def __init__(self, address: str) -> None:
        self.channel = dial(address)
        self.stub = peer_pb2_grpc.PeerStub(self.channel)  # type: ignore[no-untyped-call]
        self.calls = 0


class RoundGoneError(IncompleteError):
    """A peer does not keep a round that is needed here."""


class _CallError(Exception):
    """Why a call did not get to its end, and gRPC's code where there is one."""

    def __init__(self, reason: str, code: grpc.StatusCode | None = None) -> None:
        super().__init__(reason)
        self.code = code


class _Attempt:
    """One try of something that is repeated until it works."""

    def __init__(self) -> None:
        self._last_message = ""
        self._said: deque[str] = deque(maxlen=8)
        self._delay, self._longest = _FIRST_DELAY, _LONGEST_DELAY

    def succeeded(self) -> None:
        """Later failures are news again, and retried at once."""
        self._delay, self._last_message = _FIRST_DELAY, ""
        self._said.clear()

    def failed(
        self, log: logging.Logger, message: str, *, longest: float = _LONGEST_DELAY, level: int = logging.INFO
    ) -> bool:
        """Log a failure, unless that was said before; whether it is the same as the last one."""
        is_repeated = message == self._last_message
        if message not in self._said:
            self._said.append(message)
            log.log(level, message)
        self._last_message, self._longest = message, longest
        return is_repeated

    async def pause(self) -> None:
        """Longer each time, and of random length, so that many peers do not call in step."""
        delay = min(self._delay, self._longest)
        await asyncio.sleep(random.uniform(delay / 2, delay))
        self._delay = min(2 * self._delay, _LONGEST_DELAY_AFTER_DAMAGE)


async def _attempts() -> AsyncIterator[_Attempt]:
    """Yields for ever, with pauses."""
    attempt = _Attempt()
    while True:
        yield attempt
        await attempt.pause()


def _in_short(details: str) -> str:
    """gRPC's words; of a connection that failed only the cause, which it says after all addresses and layers."""
    return printable(details.rpartition(": ")[2] if "last error: " in details else details, 200)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
