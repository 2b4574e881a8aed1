"""One bounded call to another peer: who answers, what it runs, and what its clock says."""

from __future__ import annotations

import time
from dataclasses import dataclass

import grpc
import grpc.aio

from crad_p2p.errors import ExitCode
from crad_p2p.federation import Federation
from launch.preflight.probe import CHECKING
from peer._proto.crad.v1 import peer_pb2
from peer.channels import RawStub, dial
from peer.hello import describe_disagreement, greeting
from peer.intake import MessageError, check_seen, parse
from peer.signatures import check_greeting
from peer.strangers import describe_stranger
from peer.tls import Tls
from peer.waiting import within
from peer.words import in_short

#: Seconds for one try. Connecting takes three round trips.
_PATIENCE = 4.0
#: In gRPC's words, for a connection that is there and ends before anything is said: so does a forwarded port that has
#: no peer behind it.
_ENDED = ("Handshake read failed", "Socket closed")
_CLOSED = "connections are taken and closed at once"
_PLAIN = "if a peer is there it probably expects TLS: leave --insecure out"


@dataclass(frozen=True)
class Caller:
    """Who calls: this peer."""

    federation: Federation
    own_id: int
    tls: Tls | None


@dataclass(frozen=True)
class Greeting:
    """An answer that is in order.

    Attributes:
        is_check: it comes from a check there, and not from a running peer.
        round_trip: seconds.
        ahead: seconds by which the clock there is ahead, right to half the round trip.
    """

    reply: peer_pb2.HelloReply
    is_check: bool
    round_trip: float
    ahead: float


class NoAnswerError(Exception):
    """Nobody was reached, and why. That may pass."""


class WrongAnswerError(Exception):
    """Somebody was reached, and a run with that one cannot be. That does not pass."""

    def __init__(self, exit_code: ExitCode, text: str, remedy: str) -> None:
        super().__init__(text)
        self.exit_code = exit_code
        self.remedy = remedy


async def greet(caller: Caller, peer: int, address: str, seconds: float = _PATIENCE) -> Greeting:
    """Say hello to the peer at HOST:PORT, once.

    Raises:
        NoAnswerError: it cannot be reached.
        WrongAnswerError: it is another one, refuses this one, or runs something else.
    """
    channel = dial(address, caller.tls, peer)
    try:
        stub = RawStub(channel)
        first = await _hello(caller, stub, peer, seconds)
        try:  # again, now that there is a connection: the first one took the time of its making, too
            second = await _hello(caller, stub, peer, seconds)
        except grpc.aio.AioRpcError:
            return first
        return min(first, second, key=lambda each: each.round_trip)
    except grpc.aio.AioRpcError as error:
        details = in_short(error.details() or "")
        if error.code() in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED):
            is_certificate = error.code() == grpc.StatusCode.UNAUTHENTICATED
            raise WrongAnswerError(
                ExitCode.CERTIFICATE if is_certificate else ExitCode.PEERS_DISAGREE,
                f"refuses this peer: {details}",
                "ask that site which CA it trusts" if is_certificate else "give both the same federation file",
            ) from None
        if caller.tls is not None and (found := await describe_stranger(address, peer, caller.tls)):
            if "EOF" in found.text:
                raise NoAnswerError(_CLOSED) from None
            raise WrongAnswerError(ExitCode.CERTIFICATE, found.text, found.remedy) from None
        name = error.code().name.lower().replace("_", " ")
        slow = error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        if any(map(details.__contains__, _ENDED)):
            raise NoAnswerError(_CLOSED if caller.tls is not None else f"{_CLOSED}; {_PLAIN}") from None
        raise NoAnswerError(f"no answer within {seconds:g} s" if slow else details or name) from None
    finally:
        await channel.close()


async def _hello(caller: Caller, stub: RawStub, peer: int, seconds: float) -> Greeting:
    request = greeting(caller.federation, caller.own_id)
    clock, start = time.time(), time.monotonic()
    call = stub.Hello(request, timeout=seconds, metadata=CHECKING)
    raw = await call
    round_trip = time.monotonic() - start
    try:
        reply = parse(peer_pb2.HelloReply, raw)
    except MessageError as error:
        raise WrongAnswerError(
            ExitCode.PEERS_DISAGREE, f"its answer cannot be used: {error}", "ask that site what runs there"
        ) from None
    if caller.tls is not None:
        _check_proof(caller, caller.tls, reply, peer, request.nonce)
        _forget_unproved(caller, caller.tls, reply)
    if reply.peer != peer:
        difference: str | None = f"it says that it is peer {reply.peer}"
    else:
        difference = describe_disagreement(reply, caller.federation, caller.own_id)
    if difference:
        raise WrongAnswerError(
            ExitCode.PEERS_DISAGREE, difference, "give both the same federation file and software version"
        )
    behind = tuple((key, value) for key, value in await call.trailing_metadata() or ())
    return Greeting(reply, set(CHECKING) <= set(behind), round_trip, ahead=reply.unix_time - (clock + round_trip / 2))


def _check_proof(caller: Caller, tls: Tls, reply: peer_pb2.HelloReply, peer: int, nonce: bytes) -> None:
    try:
        check_greeting(
            reply.certificate,
            reply.proof,
            federation=caller.federation.federation,
            authorities=tls.authorities,
            caller=caller.own_id,
            called=peer,
            nonce=nonce,
        )
    except ValueError as error:
        raise WrongAnswerError(
            ExitCode.CERTIFICATE, f"it does not prove to be peer {peer}: {error}", "ask that site what runs there"
        ) from None


def _forget_unproved(caller: Caller, tls: Tls, reply: peer_pb2.HelloReply) -> None:
    """A peer does not believe that another has had a round of it, unless that shows what this one has signed."""
    try:
        if reply.HasField("seen_round"):
            check_seen(reply, caller.federation, caller.own_id, tls.authorities)
    except ValueError:
        reply.ClearField("seen_round")
        reply.ClearField("seen_sha256")


async def state_of(
    caller: Caller, peer: int, address: str, seconds: float, *, with_data: bool
) -> peer_pb2.PeerState | None:
    """What the peer does; None if it does not say so in so many seconds.

    Args:
        with_data: wait until it says what data it has.
    """
    channel = dial(address, caller.tls, peer)
    try:
        return await within(seconds, _watch(caller, RawStub(channel), peer, seconds, with_data))
    except (grpc.aio.AioRpcError, MessageError, TimeoutError, WrongAnswerError):
        return None
    finally:
        await channel.close()


async def _watch(
    caller: Caller, stub: RawStub, peer: int, seconds: float, with_data: bool
) -> peer_pb2.PeerState | None:
    await _hello(caller, stub, peer, seconds)  # so that the called peer knows who watches, even without TLS
    call = stub.Watch(peer_pb2.WatchRequest(), metadata=CHECKING)
    try:
        while (raw := await call.read()) is not grpc.aio.EOF:
            state = parse(peer_pb2.PeerState, raw)
            if state.HasField("data") or not with_data:
                return state
    finally:
        call.cancel()
    return None
