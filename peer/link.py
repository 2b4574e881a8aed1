"""The link to one other peer: says hello, watches it, and fetches what it has published. Reconnects until stopped."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import grpc.aio

from crad_p2p.errors import IncompleteError, PeersDisagreeError
from crad_p2p.failpoints import fail_point
from crad_p2p.federation import Federation
from crad_p2p.foreign import printable
from crad_p2p.manifest import Manifest
from crad_p2p.snapshot import DamagedFileError, SnapshotError
from peer._proto.crad.v1 import peer_pb2, peer_pb2_grpc
from peer.channels import CHUNK_BYTES, Waits, dial
from peer.hello import describe_disagreement, greeting
from peer.intake import Intake
from peer.waiting import within

logger = logging.getLogger(__name__)

_FIRST_DELAY, _LONGEST_DELAY = 0.1, 5.0


class Link:
    """One other peer, seen from here.

    Args:
        on_hello: called with every answer to the greeting, before the link counts as up; what it raises ends
            :meth:`watch`.
        on_state: called with every state the peer sends.
        on_connection: called with True when the link comes up and False when it goes down.
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
    ) -> None:
        self.peer = peer
        self.bytes_received = 0
        self._address = federation.peer(peer).address
        self._federation = federation
        self._own_id = own_id
        self._waits = waits
        self._on_hello = on_hello
        self._on_state = on_state
        self._on_connection = on_connection
        self._has_agreed = False
        self._channel = dial(self._address)
        self._stub = peer_pb2_grpc.PeerStub(self._channel)  # type: ignore[no-untyped-call]

    async def close(self) -> None:
        await self._channel.close()

    async def watch(self) -> None:
        """Follow the peer's state; returns when it has left for good.

        Raises:
            PeersDisagreeError: it runs another federation or software.
        """
        async for attempt in _attempts():
            try:
                self._on_hello(self.peer, await self._greet())
                self._on_connection(self.peer, True)
                attempt.succeeded()
                with self._call():
                    if await self._follow():
                        return
                reason = "it ended the stream"
            except _CallError as error:
                reason = str(error)
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
                with self._call():
                    reply = await self._stub.GetManifest(request, timeout=self._waits.connect)
                return intake.manifest(reply.document, owner, number)
            except _CallError as error:
                self._raise_if_gone(error, number)
                attempt.failed(logger, f"manifest of round {number} of peer {owner}: {error}; trying again")
            except SnapshotError as error:
                attempt.failed(logger, f"manifest of round {number} of peer {owner} refused: {error}; trying again")
        raise AssertionError("attempts never end")

    async def snapshot(self, manifest: Manifest, path: Path, intake: Intake) -> None:
        """Fetch a snapshot to ``path``, resumed where it was cut, and check it; repeated until it is right.

        Raises:
            SnapshotError: it came as announced, and must not be used; ``path`` has the suffix ``.refused`` then.
            RoundGoneError: the peer does not keep that round (any more).
        """
        partial = path.with_suffix(".partial")
        what = f"snapshot of round {manifest.round} of peer {manifest.peer}"
        async for attempt in _attempts():
            try:
                with self._call():
                    await self._download(manifest, partial)
                await self._check(intake, partial, manifest)
                fail_point("snapshot-received", manifest.round)
                partial.rename(path)
                fail_point("snapshot-renamed", manifest.round)
                return
            except DamagedFileError as error:
                partial.unlink(missing_ok=True)
                attempt.failed(logger, f"{what} refused: {error}; fetching it again from the start")
            except _CallError as error:
                self._raise_if_gone(error, manifest.round)
                attempt.failed(logger, f"{what} cut at byte {_size(partial)}: {error}; resuming")

    # --- inside ----------------------------------------------------------------------------------------------------

    async def _greet(self) -> peer_pb2.HelloReply:
        with self._call():
            reply: peer_pb2.HelloReply = await self._stub.Hello(
                greeting(self._federation, self._own_id), timeout=self._waits.connect
            )
        self._refuse_difference(reply)
        return reply

    def _refuse_difference(self, reply: peer_pb2.HelloReply) -> None:
        if reply.peer == self.peer:
            difference = describe_disagreement(reply, self._federation, self._own_id)
        else:
            difference = f"{self._address} should be peer {self.peer}, and answers as peer {reply.peer}"
        if difference is None:
            self._has_agreed = True
        elif self._has_agreed:
            # It was restarted with other settings. It will end by itself; nothing is wrong here.
            raise _CallError(f"it was started with other settings: {difference}")
        else:
            raise PeersDisagreeError(
                f"peers {self._own_id} and {self.peer} were started with different settings: {difference}; give "
                f"both the same federation file and software version"
            )

    @contextmanager
    def _call(self) -> Iterator[None]:
        """Turn whatever ends a call early into :class:`_CallError`."""
        try:
            yield
        except grpc.aio.AioRpcError as error:
            name = error.code().name.lower().replace("_", " ")
            raise _CallError(f"{name} ({printable(error.details() or '', 200)})", error.code()) from None
        except TimeoutError:
            raise _CallError(f"nothing came for {self._waits.no_progress:g} s") from None

    async def _follow(self) -> bool:
        """Pass on every state of the peer; whether it has said that it leaves."""
        call = self._stub.Watch(peer_pb2.WatchRequest())
        try:
            while (state := await within(self._waits.no_progress, call.read())) is not grpc.aio.EOF:
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

    async def _download(self, manifest: Manifest, partial: Path) -> None:
        """Append to ``partial`` what is missing.

        Raises:
            DamagedFileError: the stream has a gap or is longer than announced.
        """
        offset = _size(partial)
        request = peer_pb2.GetSnapshotRequest(
            peer=manifest.peer, round=manifest.round, sha256=manifest.sha256, offset=offset
        )
        call = self._stub.GetSnapshot(request)
        try:
            with partial.open("ab") as file:
                while (chunk := await within(self._waits.no_progress, call.read())) is not grpc.aio.EOF:
                    if chunk.offset != offset or not 0 < len(chunk.data) <= CHUNK_BYTES:
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

    def _raise_if_gone(self, error: _CallError, number: int) -> None:
        if error.code == grpc.StatusCode.NOT_FOUND:
            raise RoundGoneError(
                f"round {number} is needed here of peer {self.peer}, but it answers: {error}; one of the two "
                f"lost its latest rounds (an older state directory, perhaps): start that one with --recover"
            )


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
        self.delay = _FIRST_DELAY
        self._last_message = ""

    def succeeded(self) -> None:
        """Later failures are news again, and retried at once."""
        self.delay, self._last_message = _FIRST_DELAY, ""

    def failed(self, log: logging.Logger, message: str) -> None:
        """Log a failure, unless it is the same as the last one."""
        if message != self._last_message:
            log.info(message)
        self._last_message = message


async def _attempts() -> AsyncIterator[_Attempt]:
    """Yields for ever, with growing pauses of random length, so that many peers do not call in step."""
    attempt = _Attempt()
    while True:
        yield attempt
        await asyncio.sleep(random.uniform(attempt.delay / 2, attempt.delay))
        attempt.delay = min(2 * attempt.delay, _LONGEST_DELAY)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
