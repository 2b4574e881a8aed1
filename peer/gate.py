"""Where calls of other peers come in: who calls, is the request right, and how many calls are open.

Every call passes here before the servicer sees it. A caller's identity is that of its certificate, and is known before
a byte of its request is read. What is refused is counted by caller and reason, and no text of an error of this program
goes out.

All five calls are handled as streams in both directions, of which a unary call is a special case on the wire: only so
can a caller be refused before its message is taken in, be told when its call is ended, and be waited for no longer than
is sensible.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.message import Message

from crad_p2p.federation import Federation
from peer._proto.crad.v1 import peer_pb2
from peer.chunks import Piece
from peer.intake import MessageError, parse
from peer.refusals import Refusals
from peer.tls import Caller, CallerError, Tls
from peer.words import address_in

logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]

SERVICE = "crad.v1.Peer"
#: Somebody whose certificate does not say who it is.
UNKNOWN = "an unknown caller"
_UNARY: dict[str, type[Message]] = {
    "Hello": peer_pb2.HelloRequest,
    "GetManifest": peer_pb2.GetManifestRequest,
    "Refuse": peer_pb2.RefuseRequest,
}
_STREAMING: dict[str, type[Message]] = {
    "Watch": peer_pb2.WatchRequest,
    "GetSnapshot": peer_pb2.GetSnapshotRequest,
}
#: Calls of one peer that are served at the same time. A link has a handful; more are those of connections that were cut
#: and that this side has not noticed yet, or malice: a new one ends the oldest.
CALLS_OF_ONE = 24
#: The same with those that have been ended and whose last message, which nobody reads, still waits in gRPC: it cannot
#: be taken back. A link that is cut leaves one or two, until the connection counts as lost.
OPEN_OF_ONE = 4 * CALLS_OF_ONE
#: Seconds for a request to come.
_REQUEST_WAIT = 30.0
#: Connections of which it is known that they have made a call: more than can be open.
_REMEMBERED = 4_096
#: Certificates of one peer that are remembered; it has one, and another while it is renewed.
_CERTIFICATES = 16


class _Open:
    """A call that is open, and why it is being ended, if it is."""

    def __init__(self, caller: int | None, context: Context) -> None:
        self.caller = caller
        self.context = context
        self.name = UNKNOWN if caller is None else f"peer {caller}"
        self.key: int | str = context.peer() if caller is None else caller
        self.end_with: tuple[grpc.StatusCode, str] | None = None
        self._is_writing = False
        task = asyncio.current_task()
        assert task is not None
        self._task = task

    def end(self, code: grpc.StatusCode, text: str) -> None:
        """End it, now or when gRPC has taken the message that is being sent.

        A send that is cut off would stay in gRPC all the same, and the caller would not be told.
        """
        if self.end_with is None:
            self.end_with = (code, text)
            if not self._is_writing:
                self._task.cancel()

    async def write(self, message: Message | Piece) -> None:
        """Send a message."""
        self._is_writing = True
        try:
            await self.context.write(message)
        finally:
            self._is_writing = False
        if self.end_with is not None:
            await self.context.abort(*self.end_with)


@dataclass(frozen=True)
class Call:
    """A call that has been let in.

    Attributes:
        caller: the peer whose certificate the connection has; None without TLS.
    """

    context: Context
    caller: int | None
    refusals: Refusals

    @property
    def connection(self) -> str:
        """The caller's end of it."""
        return self.context.peer()

    def note(self, reason: str, detail: str) -> None:
        """Count something that is wrong with the caller, and log it, but not every time."""
        self.refusals.add(UNKNOWN if self.caller is None else f"peer {self.caller}", reason, detail)

    async def abort(self, code: grpc.StatusCode, text: str) -> NoReturn:
        """End the call with an error for the caller."""
        await self.context.abort(code, text)
        raise AssertionError("abort raises")


class Gate(grpc.GenericRpcHandler):
    """Hands calls on to a servicer.

    Args:
        servicer: has a method for each call, taking the request and a :class:`Call`.
        tls: None for plain text, where a caller is whoever it says it is in Hello.

    Attributes:
        handlers: of each call, by its name.
    """

    def __init__(self, servicer: Any, federation: Federation, tls: Tls | None, refusals: Refusals) -> None:
        self._servicer = servicer
        self._members = frozenset(federation.ids)
        self._tls = tls
        self._refusals = refusals
        self._open: defaultdict[int | str, list[_Open]] = defaultdict(list)
        self._called: dict[str, None] = {}  # connections that have made a call, the latest last
        self._calling = 0
        self._certificates: dict[int, set[Caller]] = {}  # with which each member has come
        if tls is not None:
            # gRPC says nothing of handshakes that fail.
            remedy = (
                "it may be a site that does not take this peer's certificate (since its file has this address for "
                "another peer, or this certificate has expired), one with --insecure, one whose certificate is not "
                "good here, a connection that was cut, or somebody who looks who listens; gRPC tells neither which nor "
                "from where. If a site cannot reach this peer, its log says why: compare addresses, the CA's "
                f"fingerprint ('crad-mesh certs inspect {tls.credentials.folder}') and the ends of certificates with it"
            )
            refusals.measure(UNKNOWN, "connected and made no call", partial(self._silent, tls), remedy)
        # Requests stay raw bytes until the caller is known.
        self.handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            name: grpc.stream_stream_rpc_method_handler(handle, response_serializer=_raw)
            for name, handle in (
                *((name, self._unary(name, kind)) for name, kind in _UNARY.items()),
                *((name, self._streaming(name, kind)) for name, kind in _STREAMING.items()),
            )
        }

    def _silent(self, tls: Tls) -> int:
        """Connections on which no call was made, those whose handshake failed included."""
        return max(0, tls.connections - self._calling)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Called by gRPC for a call of any name."""
        method = handler_call_details.method
        service, _, name = (method.decode(errors="replace") if isinstance(method, bytes) else method).rpartition("/")
        handler = self.handlers.get(name) if service == f"/{SERVICE}" else None
        if handler is None:
            self.refuse_unknown()
        return handler

    def refuse_unknown(self) -> None:
        """Count a call by a name that no call has."""
        self._refusals.add(UNKNOWN, "unknown method")

    def _unary(self, name: str, kind: type[Message]) -> Callable[[Any, Context], Coroutine[Any, Any, None]]:
        async def handle(_: Any, context: Context) -> None:
            async with self._entered(context) as entered:
                request = await self._request(kind, entered)
                call = Call(context, entered.caller, self._refusals)
                await entered.write(await getattr(self._servicer, name)(request, call))

        return handle

    def _streaming(self, name: str, kind: type[Message]) -> Callable[[Any, Context], Coroutine[Any, Any, None]]:
        async def handle(_: Any, context: Context) -> None:
            async with self._entered(context) as entered:
                request = await self._request(kind, entered)
                auth = {} if self._tls is None else context.auth_context()
                call = Call(context, entered.caller, self._refusals)
                async with aclosing(getattr(self._servicer, name)(request, call)) as messages:
                    async for message in messages:
                        if self._is_over(auth):
                            return
                        await entered.write(message)

        return handle

    @asynccontextmanager
    async def _entered(self, context: Context) -> AsyncIterator[_Open]:
        """The call, counted as open by its caller, whoever that is; ends it in words that tell nothing."""
        entered = _Open(await self._caller(context), context)
        await self._make_room(entered)
        calls = self._open[entered.key]
        calls.append(entered)
        try:
            yield entered
        except asyncio.CancelledError:
            if entered.end_with is None:  # the caller has gone, or this peer stops
                raise
            await context.abort(*entered.end_with)
        except grpc.aio.BaseError:  # the servicer's own word, or gRPC's
            raise
        except Exception:
            await self._abort_without_words(context)
        finally:
            calls.remove(entered)
            if not calls:
                self._open.pop(entered.key, None)

    async def _caller(self, context: Context) -> int | None:
        """Who calls; ends the call of somebody who may not."""
        if self._tls is None:
            return None
        self._note_connection(context.peer())
        try:
            known = self._tls.caller(context.auth_context())
            caller = known.peer
        except CallerError as error:
            who, remedy = UNKNOWN, "if that is a site of this federation, have it look at its files"
            if error.claims is not None:
                who, remedy = (
                    f"somebody with a certificate of peer {error.claims}",
                    "if that is its site, it must renew it",
                )
            remedy += f" ('crad-mesh certs {'inspect' if error.claims is None else 'renew'}' there)"
            self._refusals.add_stranger(who, address_in(context.peer()), "certificate", str(error), remedy)
            await self._abort(context, grpc.StatusCode.UNAUTHENTICATED, str(error))
        if caller not in self._members:
            text = f"peer {caller} is not in the federation file"
            remedy = "give both sites the same file, or ask whoever runs the CA for whom that certificate was signed"
            self._refusals.add_stranger(f"peer {caller}", address_in(context.peer()), "not a member", text, remedy)
            await self._abort(context, grpc.StatusCode.PERMISSION_DENIED, text)
        self._note_certificate(known)
        return caller

    def _note_certificate(self, known: Caller) -> None:
        """Say when a peer comes with a certificate with which it has not come before: a CA may be on its way out."""
        shown = self._certificates.setdefault(known.peer, set())
        if known not in shown:
            if shown:
                logger.info("peer %d comes with another certificate than before: %s", known.peer, known.certificate)
            if len(shown) >= _CERTIFICATES:
                shown.clear()
            shown.add(known)

    def _note_connection(self, connection: str) -> None:
        if connection not in self._called:
            self._calling += 1
        self._called.pop(connection, None)
        self._called[connection] = None
        if len(self._called) > _REMEMBERED:
            del self._called[next(iter(self._called))]

    async def _make_room(self, entered: _Open) -> None:
        """Keep the calls of one caller within their number."""
        calls = self._open.get(entered.key, [])
        if len(calls) < CALLS_OF_ONE:
            return
        text = "too many calls at once"
        if len(calls) >= OPEN_OF_ONE:
            what = "too many calls at once that it does not read"
            await self._refuse(entered.context, entered.name, what, text, grpc.StatusCode.RESOURCE_EXHAUSTED)
        running = [call for call in calls if call.end_with is None]
        if len(running) >= CALLS_OF_ONE:
            self._refusals.add(entered.name, text)
            running[0].end(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{text}: a later one has ended this")

    async def _request(self, kind: type[Message], entered: _Open) -> Any:
        """What the caller asks for; ends the call if that is not right, or does not come."""
        context, who = entered.context, entered.name
        text = f"no request came within {_REQUEST_WAIT:g} s"
        timer = asyncio.get_running_loop().call_later(
            _REQUEST_WAIT, entered.end, grpc.StatusCode.DEADLINE_EXCEEDED, text
        )
        try:
            raw = await context.read()
        except asyncio.CancelledError:
            self._refusals.add(who, "no request" if entered.end_with is None else entered.end_with[1])
            raise
        finally:
            timer.cancel()
        if raw is grpc.aio.EOF:
            # Ended without one, or too large, or compressed: gRPC does not say which, and has answered the latter two.
            text = "no message, or one that is too large, compressed or cut off"
            await self._refuse(context, who, "no request", text, grpc.StatusCode.INVALID_ARGUMENT)
        try:
            request: Any = parse(kind, raw)
        except MessageError as error:
            what = f"malformed {kind.DESCRIPTOR.name}"
            await self._refuse(context, who, what, str(error), grpc.StatusCode.INVALID_ARGUMENT)
        if entered.caller is not None and isinstance(request, peer_pb2.HelloRequest) and request.peer != entered.caller:
            text = f"the certificate is that of peer {entered.caller}, and the request says peer {request.peer}"
            await self._refuse(context, who, "says it is another peer", text, grpc.StatusCode.PERMISSION_DENIED)
        return request

    async def _refuse(self, context: Context, who: str, reason: str, text: str, code: grpc.StatusCode) -> NoReturn:
        self._refusals.add(who, reason, text)
        await self._abort(context, code, text)

    @staticmethod
    async def _abort(context: Context, code: grpc.StatusCode, text: str) -> NoReturn:
        await context.abort(code, text)
        raise AssertionError("abort raises")

    def _is_over(self, auth: Mapping[str, Iterable[bytes]]) -> bool:
        """Whether the caller's certificate has expired, or is not accepted any more, since the stream began."""
        if self._tls is None:
            return False
        try:
            self._tls.caller(auth)
        except CallerError:
            return True
        return False

    @staticmethod
    async def _abort_without_words(context: Context) -> NoReturn:
        """After an unexpected error: its text stays here, and a number finds it in the log."""
        number = secrets.token_hex(4)
        logger.exception("error %s in a call of %s", number, context.peer())
        await context.abort(grpc.StatusCode.INTERNAL, f"error {number}; the called peer's log says more")
        raise AssertionError("abort raises")


def _raw(message: Message | Piece) -> bytes:
    return message.SerializeToString()
