"""The link to one other peer: says hello, watches it, and fetches what it has published. Reconnects until stopped."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn, Self, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from crad_p2p.errors import CradError, IncompleteError, PeersDisagreeError
from crad_p2p.failpoints import fail_point
from crad_p2p.federation import Federation
from crad_p2p.manifest import Manifest
from crad_p2p.snapshot import DamagedFileError, SnapshotError
from peer._proto.crad.v1 import peer_pb2
from peer.attempts import LONGEST_AFTER_DAMAGE, attempts, between_tries
from peer.channels import RawStub, Waits, dial
from peer.hello import describe_disagreement, greeting
from peer.intake import SMALLEST_CHUNK_BYTES, Intake, MessageError, check_seen, parse, parse_chunk
from peer.signatures import check_greeting
from peer.strangers import describe_stranger
from peer.tls import Tls
from peer.turns import Slots, Turns
from peer.waiting import within
from peer.words import in_short, in_time

logger = logging.getLogger(__name__)

#: Seconds for which a connection must have lasted, so that its end is news, and it is dialled anew at once.
_STEADY = 5.0
#: States of a peer that are taken in a second, and their bytes; who sends more is read no faster. And what is done with
#: one, which a peer can make costly, is followed by so many times as much rest.
_STATES_A_SECOND, _STATE_BYTES_A_SECOND, _REST = 200, 4 << 20, 9
#: The peer's own word, or a connection of which gRPC knows that it is lost.
_CONNECTION_IS_FINE = (
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNAVAILABLE,
)


#: Seconds from which on it is said.
_CLOCKS_DIFFER = 5.0
#: In gRPC's words for a connection that came about, and was given up in the handshake.
_TLS_FAILED = ("Verification Check failed", "CERTIFICATE_VERIFY_FAILED", "SSL", "Socket closed")
#: Plain text that is closed so often in a row, before anything was said, has met a peer that expects TLS.
_CLOSED_TIMES = 2
_EXPECTS_TLS = (
    "the other end closes plain text: it probably expects TLS; start this peer without --insecure, and with its "
    "certificate, or that one with --insecure"
)
#: Seconds between two looks at who answers in place of the peer.
_LOOK = 10.0
#: Greetings of one peer that are under way at once where the peers are many, unless they have taken so many seconds;
#: and of those who took longer the last time. If a hundred peers on one machine called all others at once, no handshake
#: would be done within the time of an attempt, and all were in vain.
_GREETINGS, _SLOW_GREETING, _SLOW_GREETINGS = 2, 3.0, 8
#: Peers that are few enough to be called all at once.
_FEW = 20
#: Times that a peer is told that its snapshot is not used.
_TELL_TRIES = 5

M = TypeVar("M", bound=Message)


def greeting_slots(members: int) -> Slots:
    """For all links of a peer together, in a federation of so many."""
    if members <= _FEW:
        return Slots(members, math.inf)
    return Slots(_GREETINGS, _SLOW_GREETING, slow=_SLOW_GREETINGS)


class Link:
    """One other peer, seen from here.

    Args:
        on_hello: called with every answer to the greeting, before the link counts as up; what it raises ends
            :meth:`watch`.
        on_state: called with every state the peer sends.
        on_connection: called with True when the link comes up and False when it goes down.
        tls: this peer's certificate; None for plain text.
        has_agreed: whether the peer runs the same federation, as it must to have come this far. Should it say something
            else now, that is its own affair, and no reason for this one to end.
        slots: limits the transfers that run at the same time; held while one runs, and not between two attempts, so
            that peers which are away do not keep others from being served.
        greetings: likewise, of those who connect.
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
        tls: Tls | None = None,
        has_agreed: bool = False,
        slots: Slots | None = None,
        greetings: Slots | None = None,
    ) -> None:
        self.peer = peer
        self.bytes_received = 0
        self.transfer_seconds = 0.0
        self._slots = slots or Slots(1, math.inf)
        self._greetings = greetings or Slots(1, math.inf)
        self._turns = Turns()
        self.address = federation.peer(peer).address
        self._federation = federation
        self._own_id = own_id
        self._waits = waits
        self._on_hello = on_hello
        self._on_state = on_state
        self._on_connection = on_connection
        self._has_agreed = has_agreed
        self._difference: str | None = None  # found in the last greeting
        self._last_heard = 0.0  # when something came, on whatever call
        self._tls = tls
        self._valid_until: datetime | None = None  # the peer's certificate
        self.doubted = -1  # the last round of this peer that the other one claims without proof
        self._stranger: str | None = None  # what was found last at the address
        self.down_since: float | None = time.monotonic()  # None while it is connected
        self.reason = ""  # why it is not, or was not last
        self._clock = ""  # what is to be said of the peer's
        self._longest_delay = between_tries(len(federation.peers))
        self._called = asyncio.Event()  # by the other peer, since the last attempt
        self._look_again = 0.0
        self._closed_times = 0  # in a row, without TLS
        self._is_renewed = False  # this peer's certificate, since the connection was made
        self._line = self._dial()

    @property
    def trouble(self) -> str | None:
        """Why no connection comes about, if that is more than that nobody answers."""
        return self._stranger

    def renew(self) -> None:
        """Connect anew, with the certificate that this peer has now; what is under way goes on."""
        self._is_renewed = True
        self._redial(self._line)

    def call_back(self) -> None:
        """The other peer has called, so it is there: try now, if there is no connection."""
        self._called.set()

    async def close(self) -> None:
        await self._line.channel.close()

    async def watch(self) -> NoReturn:
        """Follow the peer's state, also when it comes back after it has left.

        Raises:
            PeersDisagreeError: it runs another federation or software.
        """
        is_up: bool | None = None
        has_left = False
        async for attempt in attempts(self._called):
            try:
                self._called.clear()
                self._is_renewed = False
                self._on_hello(self.peer, await self._greet())
                if not is_up:  # once, and again after a line that it was not
                    attempt.say(logger, f"peer {self.peer} at {self.address}: connected{self._clock}")
                is_up, has_left, self.down_since = True, False, None
                self._closed_times = 0
                self._on_connection(self.peer, True)
                self._stranger = None
                begun = time.monotonic()
                try:
                    async with self._call() as stub:
                        has_left = await self._follow(stub)
                finally:
                    if time.monotonic() - begun >= _STEADY:
                        attempt.succeeded()
                reason = "it ended the stream"
            except _CallError as error:
                reason = str(error)
                if error.is_of_tls:
                    reason = await self._look_closer() or reason
                else:
                    self._closed_times = 0
            except (CradError, OSError):
                raise
            except Exception:  # whatever its words have set off here must not end this peer
                logger.exception("peer %d at %s: what it says cannot be dealt with", self.peer, self.address)
                reason = "what it says cannot be dealt with"
            self.reason = reason
            if is_up is not False:  # not once for every attempt that fails
                is_up = False
                if self.down_since is None:
                    self.down_since = time.monotonic()
                self._on_connection(self.peer, False)
            level = logging.WARNING if reason == self._stranger else logging.INFO  # that does not heal by itself
            level = logging.DEBUG if has_left else level
            attempt.failed(
                logger,
                f"peer {self.peer} at {self.address}: {reason}; trying again",
                level=level,
                longest=LONGEST_AFTER_DAMAGE if has_left else self._longest_delay,
            )
        raise AssertionError("attempts never end")

    async def hello(self) -> peer_pb2.HelloReply:
        """The answer to the greeting, asked for until it comes.

        Raises:
            PeersDisagreeError: it runs another federation or software.
        """
        async for attempt in attempts():
            try:
                return await self._greet()
            except _CallError as error:
                attempt.failed(logger, f"peer {self.peer} at {self.address}: {error}; trying again")
        raise AssertionError("attempts never end")

    async def manifest(
        self,
        number: int,
        intake: Intake,
        owner: int | None = None,
        *,
        counts: tuple[int, ...] | None = None,
        may_draw_again: bool = False,
    ) -> Manifest:
        """A manifest of the peer, or one of ``owner`` that the peer keeps; asked for until it is there and right. More
        arguments as :meth:`Intake.manifest`.

        Raises:
            SnapshotError: it is the document asked for, and must not be used.
            RoundGoneError: the peer does not keep that round (any more).
        """
        owner = self.peer if owner is None else owner
        request = peer_pb2.GetManifestRequest(peer=owner, round=number)
        async for attempt in attempts():
            try:
                async with self._call() as stub:
                    call = stub.GetManifest(request, timeout=self._waits.connect)
                    reply = await self._answer(peer_pb2.GetManifestReply, call)
                return intake.manifest(
                    reply.document,
                    owner,
                    number,
                    sha256=reply.manifest_sha256,
                    counts=counts,
                    may_draw_again=may_draw_again,
                )
            except _CallError as error:
                is_repeated = attempt.failed(
                    logger,
                    f"manifest of round {number} of peer {owner}: {error}; trying again",
                    level=logging.DEBUG if error.code == grpc.StatusCode.NOT_FOUND else logging.INFO,  # told below
                )
                self._raise_if_gone(error, number, is_repeated=is_repeated)
            except DamagedFileError as error:
                attempt.failed(
                    logger,
                    f"manifest of round {number} of peer {owner} refused: {error}; trying again",
                    longest=LONGEST_AFTER_DAMAGE,
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
        async for attempt in attempts():
            try:
                async with (
                    self._turns.take(manifest.round),
                    self._slots.take(self.peer),
                    self._timed(),
                    self._call() as stub,
                ):
                    await self._download(stub, manifest, partial, intake, recheck=was_damaged)
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
                    longest=LONGEST_AFTER_DAMAGE,
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

    async def refuse(self, number: int, sha256: str, reason: str) -> None:
        """Tell the peer that its snapshot is not used here, and why; given up after a few tries.

        Args:
            sha256: of the snapshot; empty if its manifest could not be read.
        """
        request = peer_pb2.RefuseRequest(round=number, sha256=sha256, reason=reason[:1_000])
        tries = 0
        async for attempt in attempts():
            try:
                async with self._call() as stub:
                    await self._answer(peer_pb2.RefuseReply, stub.Refuse(request, timeout=self._waits.connect))
                return
            except _CallError as error:
                tries += 1
                if tries == _TELL_TRIES:
                    logger.info("peer %d could not be told that its snapshot is not used: %s", self.peer, error)
                    return
                attempt.failed(logger, str(error), level=logging.DEBUG)

    # --- inside ----------------------------------------------------------------------------------------------------

    async def _greet(self) -> peer_pb2.HelloReply:
        """Say hello. If that fails, the next try has a channel of its own, which connects when it is used: one that has
        failed would go on trying by itself, and answer for a while that it does not try.
        """
        async with self._greetings.take(self.peer):
            line = self._line
            try:
                return await self._say_hello()
            except _CallError:
                self._redial(line)
                if not line.calls:
                    await line.channel.close()
                raise

    async def _say_hello(self) -> peer_pb2.HelloReply:
        request = greeting(self._federation, self._own_id)
        async with self._call() as stub:
            clock, start = time.time(), time.monotonic()
            reply = await self._answer(peer_pb2.HelloReply, stub.Hello(request, timeout=self._waits.connect))
            self._clock = _clock_text(reply.unix_time - clock, time.monotonic() - start)
            self._require_proof(reply, request.nonce)
            self._refuse_difference(reply)  # before: of another run it has had, and proves, other rounds
            self._forget_unproved(reply)
        return reply

    async def _look_closer(self) -> str | None:
        """Why no connection comes about; looked at now and then, since the reason rarely changes."""
        now = asyncio.get_running_loop().time()
        if self._tls is None:
            self._closed_times += 1
            self._stranger = _EXPECTS_TLS if self._closed_times >= _CLOSED_TIMES else None
        elif now >= self._look_again:
            found = await describe_stranger(self.address, self.peer, self._tls)
            self._stranger = None if found is None else str(found)
            self._look_again = now + _LOOK
        return self._stranger

    def _require_proof(self, reply: peer_pb2.HelloReply, nonce: bytes) -> None:
        """TLS has compared the certificate's host name; this is about its one URI, which says who the peer is."""
        if self._tls is None:
            return
        try:
            self._valid_until = check_greeting(
                reply.certificate,
                reply.proof,
                federation=self._federation.federation,
                authorities=self._tls.authorities,
                caller=self._own_id,
                called=self.peer,
                nonce=nonce,
            )
        except ValueError as error:
            raise _CallError(f"it does not prove to be peer {self.peer}: {error}") from None

    def _forget_unproved(self, reply: peer_pb2.HelloReply) -> None:
        """Do not believe that the peer has had a round of this one, unless it shows what this one has signed."""
        if self._tls is None or not reply.HasField("seen_round"):
            return
        try:
            check_seen(reply, self._federation, self._own_id, self._tls.authorities)
        except ValueError as error:
            if reply.seen_round != self.doubted:
                self.doubted = reply.seen_round
                said = f"it has had round {reply.seen_round} of this peer, and does not prove it"
                logger.warning("peer %d says that %s: %s", self.peer, said, error)
            reply.ClearField("seen_round")
            reply.ClearField("seen_sha256")

    def _refuse_difference(self, reply: peer_pb2.HelloReply) -> None:
        if reply.peer == self.peer:
            difference = describe_disagreement(reply, self._federation, self._own_id)
        else:
            difference = f"{self.address} should be peer {self.peer}, and answers as peer {reply.peer}"
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
                f"both the same federation file and software version",
                peer=self.peer,
            )

    @asynccontextmanager
    async def _call(self) -> AsyncIterator[RawStub]:
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
            details = error.details() or ""
            said = in_short(details)
            raise _CallError(
                f"{name} ({said})" if said else name,
                error.code(),
                is_of_tls=any(map(details.__contains__, _TLS_FAILED)),
            ) from None
        except TimeoutError:
            self._redial(line)
            raise _CallError(f"nothing came for {self._waits.no_progress:g} s") from None
        except MessageError as error:
            self._redial(line)
            raise _CallError(f"its answer cannot be used: {error}") from None
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

    def _dial(self) -> _Line:
        return _Line(dial(self.address, self._tls, self.peer, members=len(self._federation.peers)))

    def _redial(self, line: _Line) -> None:
        if line is self._line:
            self._line = self._dial()

    async def _answer(self, kind: type[M], call: Awaitable[Any]) -> M:
        """What the peer answers, checked."""
        raw = await call
        self._last_heard = asyncio.get_running_loop().time()
        if raw is grpc.aio.EOF:
            raise _EndOfStream
        return parse(kind, raw)

    async def _next(self, kind: type[M], call: Any, sign_of_life: Callable[[], float] | None = None) -> M | None:
        """The next message of a stream; None at its end."""
        try:
            return await within(self._waits.no_progress, self._answer(kind, call.read()), sign_of_life)
        except _EndOfStream:
            return None

    async def _follow(self, stub: RawStub) -> bool:
        """Pass on every state of the peer; whether it has said that it leaves after the last round."""
        call = stub.Watch(peer_pb2.WatchRequest())
        try:
            # On a slow link that is busy with a transfer, states come late, and the transfer shows that it is alive.
            while state := await self._next(peer_pb2.PeerState, call, sign_of_life=lambda: self._last_heard):
                begun = time.perf_counter()
                self._on_state(self.peer, state)
                took = time.perf_counter() - begun
                if state.leaving and state.round == self._federation.rounds:
                    return True
                if self._is_renewed:
                    raise _CallError(f"peer {self._own_id}, this one, has new certificate files: connecting with them")
                if self._valid_until is not None and datetime.now(UTC) >= self._valid_until:
                    raise _CallError("its certificate has expired")
                size = state.ByteSize()
                await asyncio.sleep(max(1 / _STATES_A_SECOND, size / _STATE_BYTES_A_SECOND, min(1.0, _REST * took)))
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

    async def _download(
        self, stub: RawStub, manifest: Manifest, partial: Path, intake: Intake, *, recheck: bool
    ) -> None:
        """Append to ``partial`` what is missing.

        Raises:
            DamagedFileError: the stream has a gap or is longer than announced, or its header is not right, which
                its owner has not looked at yet.
            SnapshotError: the header is not that of the architecture, and its owner has found the file whole.
        """
        offset = _size(partial)
        # Without TLS a header may be damaged on the way again and again, and the digest tells that only at the end.
        has_right_header = self._tls is None
        request = peer_pb2.GetSnapshotRequest(
            peer=manifest.peer, round=manifest.round, sha256=manifest.sha256, offset=offset, recheck=recheck
        )
        call = stub.GetSnapshot(request)
        try:
            with _Patience(self._waits.no_progress, call) as patience, partial.open("ab") as file:
                while (chunk := await self._chunk(call)) is not None:
                    at, data = chunk
                    if at != offset:
                        raise DamagedFileError(f"chunk of {len(data)} bytes at {at}, expected one at {offset}")
                    offset += len(data)
                    if offset > manifest.size:
                        raise DamagedFileError(f"stream goes on beyond the {manifest.size} bytes of the manifest")
                    if len(data) < SMALLEST_CHUNK_BYTES and offset < manifest.size:
                        raise DamagedFileError(f"chunk of {len(data)} bytes in the middle of the file")
                    file.write(data)
                    self.bytes_received += len(data)
                    if not has_right_header:
                        file.flush()
                        has_right_header = self._has_right_header(intake, partial, manifest, is_vouched_for=recheck)
                    patience.renew()
        except MessageError as error:
            raise DamagedFileError(str(error)) from None
        finally:
            call.cancel()

    async def _chunk(self, call: Any) -> tuple[int, memoryview] | None:
        """Offset and data of the next chunk of a stream; None at its end."""
        raw = await call.read()
        self._last_heard = asyncio.get_running_loop().time()
        return None if raw is grpc.aio.EOF else parse_chunk(raw)

    @staticmethod
    def _has_right_header(intake: Intake, partial: Path, manifest: Manifest, *, is_vouched_for: bool) -> bool:
        """Look at the header as soon as it is here, so that not all of a wrong file is fetched."""
        try:
            return intake.start_of_snapshot(partial, manifest)
        except SnapshotError as error:
            if is_vouched_for:
                partial.rename(partial.with_suffix(".refused"))
                raise
            raise DamagedFileError(str(error)) from None

    def _raise_if_gone(self, error: _CallError, number: int, *, is_repeated: bool) -> None:
        """A peer that answers so once may have read a damaged request."""
        if error.code == grpc.StatusCode.NOT_FOUND and is_repeated:
            raise RoundGoneError(
                f"round {number} is needed here of peer {self.peer}, but it answers: {error}; one of the two "
                f"lost its latest rounds (an older state directory, perhaps): start that one with --recover"
            )


class _Line:
    """One channel to the peer, and how many calls are on it."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.stub = RawStub(channel)
        self.calls = 0


class _Patience:
    """Ends a call when nothing has come for so long; what is done between two messages does not count.

    One timer, which looks how long it has been: a task and a timer for each message cost more than its encryption. And
    not ``asyncio.timeout``: one that expires just as its block ends leaves, before Python 3.13, a cancellation behind.

    Raises:
        TimeoutError: in place of the cancellation that the call's end looks like.
    """

    def __init__(self, seconds: float, call: Any) -> None:
        self._seconds, self._call, self._is_over = seconds, call, False
        self._loop = asyncio.get_running_loop()
        self.renew()

    def renew(self) -> None:
        """Something has come."""
        self._since = self._loop.time()

    def __enter__(self) -> Self:
        self._timer = self._loop.call_later(self._seconds, self._look)
        return self

    def _look(self) -> None:
        left = self._since + self._seconds - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._look)
        else:
            self._is_over = True
            self._call.cancel()

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._timer.cancel()
        task = asyncio.current_task()
        assert task is not None
        is_of_call = error is None or (isinstance(error, asyncio.CancelledError) and not task.cancelling())
        if self._is_over and is_of_call:
            raise TimeoutError from None


class RoundGoneError(IncompleteError):
    """A peer does not keep a round that is needed here."""


class _CallError(Exception):
    """Why a call did not get to its end, and gRPC's code where there is one."""

    def __init__(self, reason: str, code: grpc.StatusCode | None = None, *, is_of_tls: bool = False) -> None:
        super().__init__(reason)
        self.code = code
        self.is_of_tls = is_of_tls


class _EndOfStream(Exception):
    """No message, since there are no more."""


def _clock_text(ahead: float, took: float) -> str:
    """That the clocks of two hosts differ, for whoever compares their logs; nothing depends on it.

    Args:
        ahead: seconds by which the time in an answer is later than that of the question.
        took: seconds between the two.
    """
    ahead -= took / 2
    if abs(ahead) <= _CLOCKS_DIFFER + took / 2:
        return ""
    return (
        f"; its clock is {in_time(abs(ahead))} {'ahead of' if ahead > 0 else 'behind'} the one here, which does no harm"
    )


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
