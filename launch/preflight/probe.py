"""A server in the peer's place while it is checked, to see who reaches it.

Every running peer calls all others until they answer. This server notes who does, and answers that the peer is not
there yet. Other checks are told apart by their metadata, and get answers, so that sites that prepare at the same time
see whether they agree.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NoReturn

import grpc

from crad_p2p.federation import Federation
from peer._proto.crad.v1 import peer_pb2
from peer.chunks import Piece
from peer.gate import Call
from peer.refusals import Refusals
from peer.server import PeerServicer, Server
from peer.status import Status
from peer.store import Store
from peer.tls import Tls
from peer.waiting import within

#: Sent with every call of a check, and behind every answer of one.
CHECKING = (("crad-check", "1"),)


class Probe(PeerServicer):
    """Answers other checks as a peer at its start; who else calls is noted, and sent away."""

    def __init__(self, federation: Federation, own_id: int, state_dir: Path, tls: Tls | None) -> None:
        super().__init__(federation, own_id, Store(state_dir), Status(), tls=tls)
        self.refusals = Refusals()
        self.callers: set[int] = set()
        self.informed: set[int] = set()  # other checks that have been told of the data here
        self._news = asyncio.Event()
        self._server: Server | None = None

    async def start(self, listen: str) -> None:
        """Serve.

        Raises:
            PortTakenError: the address cannot be had.
            CertificateError: gRPC does not take the certificate files.
        """
        self._server = Server(listen, self, self.refusals)
        await self._server.start()

    async def stop(self) -> None:
        """Serve no more."""
        self._status.close()
        await self._status.drained(1.0)  # else grpc logs a traceback for every stream that it cuts
        # Not kept, lest it is deleted after its loop has ended, of which gRPC makes a traceback.
        server, self._server = self._server, None
        if server is not None:
            await server.stop(grace=1.0)

    def show(self, data: peer_pb2.Data) -> None:
        """What other checks are told of the data here."""
        self._status.show_data(data)

    async def called_by(self, peers: set[int], seconds: float) -> None:
        """Wait until all these have called, at most so long."""
        await self._until(peers, self.callers, seconds)

    async def told(self, peers: set[int], seconds: float) -> None:
        """Wait until all these have been told of the data, at most so long."""
        await self._until(peers, self.informed, seconds)

    async def _until(self, peers: set[int], there: set[int], seconds: float) -> None:
        clock = asyncio.get_running_loop().time
        deadline = clock() + seconds
        while not peers <= there and (left := deadline - clock()) > 0:
            self._news.clear()
            try:
                await within(left, self._news.wait())
            except TimeoutError:
                return

    async def Hello(self, request: peer_pb2.HelloRequest, call: Call) -> peer_pb2.HelloReply:
        await self._receive(request.peer if call.caller is None else call.caller, call)
        return await super().Hello(request, call)

    async def Watch(self, request: peer_pb2.WatchRequest, call: Call) -> AsyncIterator[peer_pb2.PeerState]:
        caller = self._callers.get(call.connection) if call.caller is None else call.caller
        await self._receive(caller, call)
        async for state in super().Watch(request, call):
            try:
                yield state
            finally:  # it may well end the call with what it was waiting for
                if state.HasField("data") and caller is not None:
                    self.informed.add(caller)
                    self._news.set()

    async def Refuse(self, request: peer_pb2.RefuseRequest, call: Call) -> NoReturn:
        del request
        await self._send_away(call)

    async def GetManifest(self, request: peer_pb2.GetManifestRequest, call: Call) -> NoReturn:
        del request
        await self._send_away(call)

    async def GetSnapshot(self, request: peer_pb2.GetSnapshotRequest, call: Call) -> AsyncIterator[Piece]:
        del request
        await self._send_away(call)
        yield Piece(0, b"")

    async def _receive(self, caller: int | None, call: Call) -> None:
        if caller is not None and caller != self._id:
            self.callers.add(caller)
            self._news.set()
        if not set(CHECKING) <= {(key, value) for key, value in call.context.invocation_metadata() or ()}:
            await self._send_away(call)
        call.context.set_trailing_metadata(CHECKING)

    async def _send_away(self, call: Call) -> NoReturn:
        await call.abort(grpc.StatusCode.UNAVAILABLE, f"peer {self._id} runs its check")
