"""Where calls of other peers come in: who calls, is the request right, and how many calls are open.

Every call passes here before the servicer sees it. A caller's identity is that of its certificate. What is refused is
counted by caller and reason, and no text of an error of this program goes out.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.message import Message

from crad_p2p.federation import Federation
from peer._proto.crad.v1 import peer_pb2
from peer.intake import MessageError, parse
from peer.refusals import Refusals
from peer.tls import CallerError, Tls

logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]

SERVICE = "crad.v1.Peer"
_UNARY: dict[str, type[Message]] = {
    "Hello": peer_pb2.HelloRequest,
    "GetManifest": peer_pb2.GetManifestRequest,
    "Refuse": peer_pb2.RefuseRequest,
}
_STREAMING: dict[str, type[Message]] = {
    "Watch": peer_pb2.WatchRequest,
    "GetSnapshot": peer_pb2.GetSnapshotRequest,
}
#: Calls of one peer that are open at the same time. A link has a handful; more are those of connections that were cut
#: and that this side has not noticed yet, or malice: a new one ends the oldest.
CALLS_OF_ONE = 24


@dataclass(frozen=True)
class Call:
    """A call that has been let in.

    Attributes:
        caller: the peer whose certificate the connection has; None without TLS.
    """

    context: Context
    caller: int | None

    @property
    def connection(self) -> str:
        """The caller's end of it."""
        return self.context.peer()

    async def abort(self, code: grpc.StatusCode, text: str) -> NoReturn:
        """End the call with an error for the caller."""
        await self.context.abort(code, text)
        raise AssertionError("abort raises")


class Gate(grpc.GenericRpcHandler):
    """Hands calls on to a servicer.

    Args:
        servicer: has a method for each call, taking the request and a :class:`Call`.
        tls: None for plain text, where a caller is whoever it says it is in Hello.
    """

    def __init__(self, servicer: Any, federation: Federation, tls: Tls | None, refusals: Refusals) -> None:
        self._servicer = servicer
        self._members = frozenset(federation.ids)
        self._tls = tls
        self._refusals = refusals
        self._open: defaultdict[int | str, list[asyncio.Task[Any]]] = defaultdict(list)
        self._begun = self._reached = 0
        # Requests stay raw bytes until the caller is known.
        self._handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            f"/{SERVICE}/{name}": grpc.unary_unary_rpc_method_handler(self._unary(name, kind), response_serializer=_raw)
            for name, kind in _UNARY.items()
        } | {
            f"/{SERVICE}/{name}": grpc.unary_stream_rpc_method_handler(
                self._streaming(name, kind), response_serializer=_raw
            )
            for name, kind in _STREAMING.items()
        }

    @property
    def without_request(self) -> int:
        """Calls that have brought no request: one too large or compressed (gRPC ends these itself), or none yet."""
        return self._begun - self._reached

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Called by gRPC for every call."""
        method = handler_call_details.method
        handler = self._handlers.get(method.decode(errors="replace") if isinstance(method, bytes) else method)
        if handler is None:
            self._refusals.add("a caller", "unknown method", str(method))
        else:
            self._begun += 1
        return handler

    def _unary(self, name: str, kind: type[Message]) -> Callable[[bytes, Context], Any]:
        async def call(raw: bytes, context: Context) -> Any:
            caller, request = await self._admit(kind, raw, context)
            with self._counted(caller, context):
                try:
                    return await getattr(self._servicer, name)(request, Call(context, caller))
                except grpc.aio.BaseError:  # the servicer's own word, or gRPC's
                    raise
                except Exception:
                    await self._abort_without_words(context)

        return call

    def _streaming(self, name: str, kind: type[Message]) -> Callable[[bytes, Context], AsyncIterator[Any]]:
        async def call(raw: bytes, context: Context) -> AsyncIterator[Any]:
            caller, request = await self._admit(kind, raw, context)
            auth = {} if self._tls is None else context.auth_context()
            with self._counted(caller, context):
                try:
                    async for message in getattr(self._servicer, name)(request, Call(context, caller)):
                        if self._is_over(auth):
                            return
                        yield message
                except grpc.aio.BaseError:
                    raise
                except Exception:
                    await self._abort_without_words(context)

        return call

    async def _admit(self, kind: type[Message], raw: bytes, context: Context) -> tuple[int | None, Any]:
        """Who calls, and its request; ends the call if either is not right."""
        self._reached += 1
        caller = None
        if self._tls is not None:
            try:
                caller = self._tls.caller(context.auth_context()).peer
            except CallerError as error:
                await self._refuse(context, "a caller", "certificate", str(error), grpc.StatusCode.UNAUTHENTICATED)
            if caller not in self._members:
                text = f"peer {caller} is not in the federation file"
                await self._refuse(context, f"peer {caller}", "not a member", text, grpc.StatusCode.PERMISSION_DENIED)
        who = "a caller" if caller is None else f"peer {caller}"
        try:
            request = parse(kind, raw)
        except MessageError as error:
            what = f"malformed {kind.DESCRIPTOR.name}"
            await self._refuse(context, who, what, str(error), grpc.StatusCode.INVALID_ARGUMENT)
        if caller is not None and isinstance(request, peer_pb2.HelloRequest) and request.peer != caller:
            text = f"the certificate is that of peer {caller}, and the request says peer {request.peer}"
            await self._refuse(context, who, "says it is another peer", text, grpc.StatusCode.PERMISSION_DENIED)
        return caller, request

    async def _refuse(self, context: Context, who: str, reason: str, text: str, code: grpc.StatusCode) -> NoReturn:
        self._refusals.add(who, reason, text)
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

    @contextmanager
    def _counted(self, caller: int | None, context: Context) -> Iterator[None]:
        """Count an open call; one too many ends the oldest of the same caller."""
        who = context.peer() if caller is None else caller
        task = asyncio.current_task()
        assert task is not None
        calls = self._open[who]
        if len(calls) >= CALLS_OF_ONE:
            self._refusals.add("a caller" if caller is None else f"peer {caller}", "too many calls at once")
            calls.pop(0).cancel()
        calls.append(task)
        try:
            yield
        finally:
            if task in calls:
                calls.remove(task)
            if not calls:
                self._open.pop(who, None)

    @staticmethod
    async def _abort_without_words(context: Context) -> NoReturn:
        """After an unexpected error: its text stays here, and a number finds it in the log."""
        number = secrets.token_hex(4)
        logger.exception("error %s in a call of %s", number, context.peer())
        await context.abort(grpc.StatusCode.INTERNAL, f"error {number}; the called peer's log says more")
        raise AssertionError("abort raises")


def _raw(message: Message) -> bytes:
    return message.SerializeToString()
