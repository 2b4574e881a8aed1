"""The service that the other peers call: reads the store and the status, changes nothing."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import math
import os
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, NoReturn

import grpc
import grpc.aio

from crad_p2p import __version__
from crad_p2p.errors import PortTakenError
from crad_p2p.federation import Federation
from crad_p2p.foreign import printable
from crad_p2p.manifest import Manifest
from crad_p2p.snapshot import SNAPSHOT_FILE, sha256_file
from peer._proto.crad.v1 import peer_pb2, peer_pb2_grpc
from peer.channels import CHUNK_BYTES, SERVER_OPTIONS
from peer.hello import describe_disagreement
from peer.intake import document_digest
from peer.status import Status
from peer.store import MANIFEST, Store
from peer.waiting import to_the_end
from peer.witness import Witness

logger = logging.getLogger(__name__)

#: Seconds between two tries to listen again.
_REBIND = 0.1
#: Seconds for which a file that has been found whole is not read again.
_TRUSTED = 5.0
#: What a failing disk gives.
_BROKEN = (errno.EIO, errno.EISDIR)
#: How gRPC names the tasks of its calls.
_CALL = "rpc_task"

Context = grpc.aio.ServicerContext[Any, Any]


class PeerServicer(peer_pb2_grpc.PeerServicer):
    """Answers from what is committed on disk.

    Args:
        witness: what has been here of the peers that call.
        on_damage: called with a committed round whose snapshot turns out to be damaged on disk, and how.
    """

    def __init__(
        self,
        federation: Federation,
        peer_id: int,
        store: Store,
        status: Status,
        witness: Witness | None = None,
        on_damage: Callable[[int, str], None] = lambda *_: None,
    ) -> None:
        self._federation = federation
        self._agreed = json.dumps(federation.agreed()).encode()
        self._id = peer_id
        self._store = store
        self._status = status
        self._witness = witness or Witness({})
        self._on_damage = on_damage
        self._checking = asyncio.Lock()
        self._found_whole: dict[Path, float] = {}  # when, on the monotonic clock
        self.bytes_sent = 0
        self._callers: dict[int, str] = {}  # on which connection each peer has last said hello

    async def Hello(self, request: peer_pb2.HelloRequest, context: Context) -> peer_pb2.HelloReply:
        """Both sides compare. The caller ends if it must; here a disagreement is said, and the run goes on."""
        if request.peer in self._federation.ids:
            self._callers[request.peer] = context.peer()
        if difference := describe_disagreement(request, self._federation, self._id):
            logger.warning("peer %d calls with other settings: %s", request.peer, difference)
        reply = peer_pb2.HelloReply(
            peer=self._id,
            software=__version__,
            agreed=self._agreed,
            remembers=bool(self._witness.sightings),
        )
        if (seen := self._witness.sightings.get(request.peer)) is not None:
            reply.seen_round, reply.seen_sha256 = seen.round, seen.sha256
        return reply

    async def Watch(self, request: peer_pb2.WatchRequest, context: Context) -> AsyncIterator[peer_pb2.PeerState]:
        for peer, connection in self._callers.items():
            if connection == context.peer():
                self._status.follow(peer)
        async for state in self._status.watch(progress=request.progress):
            yield state

    async def GetManifest(self, request: peer_pb2.GetManifestRequest, context: Context) -> peer_pb2.GetManifestReply:
        manifest = await self._published(request.peer, request.round, context)
        document = manifest.to_bytes()
        return peer_pb2.GetManifestReply(document=document, manifest_sha256=document_digest(document))

    async def GetSnapshot(
        self, request: peer_pb2.GetSnapshotRequest, context: Context
    ) -> AsyncIterator[peer_pb2.Chunk]:
        manifest = await self._published(request.peer, request.round, context)
        if request.sha256 != manifest.sha256:
            await context.abort(
                grpc.StatusCode.NOT_FOUND,
                f"round {request.round} of peer {request.peer} has sha256 {manifest.sha256}, not "
                f"{printable(request.sha256[:64])}",
            )
        if request.offset > manifest.size:
            await context.abort(
                grpc.StatusCode.OUT_OF_RANGE, f"offset {request.offset} lies beyond the file's {manifest.size} bytes"
            )
        own = request.peer == self._id
        path = (
            self._store.round_dir(request.round) / SNAPSHOT_FILE
            if own
            else self._store.received_snapshot_path(request.peer, request.round)
        )
        if request.recheck:
            await self._check(path, manifest, context)
        try:
            # The open file stays readable to its end even if the round is deleted meanwhile.
            with path.open("rb", buffering=0) as file:
                offset = request.offset
                while data := os.pread(file.fileno(), CHUNK_BYTES, offset):
                    yield peer_pb2.Chunk(offset=offset, data=data)
                    offset += len(data)
                    self.bytes_sent += len(data)
        except FileNotFoundError:
            await self._gone(request.peer, request.round, context)
        except OSError as error:
            logger.warning("%s cannot be read: %s", path, error.strerror)
            if error.errno in _BROKEN:
                await self._check(path, manifest, context)
            await self._cannot_read(context)

    async def _check(self, path: Path, manifest: Manifest, context: Context) -> None:
        """End the call if a file is not, or not any more, what its manifest says."""
        reason = ""
        async with self._checking:  # however many ask, one is read at a time, and not anew for each of them
            if time.monotonic() < self._found_whole.get(path, -math.inf) + _TRUSTED:
                return
            try:
                if await to_the_end(asyncio.to_thread(sha256_file, path)) != manifest.sha256:
                    reason = f"{SNAPSHOT_FILE} does not have the digest that {MANIFEST} says"
            except FileNotFoundError:
                await self._gone(manifest.peer, manifest.round, context)
            except OSError as error:
                if error.errno not in _BROKEN:  # too many open files, perhaps: nothing is known of this one
                    await self._cannot_read(context)
                reason = f"{SNAPSHOT_FILE}: {error.strerror}"
            if not reason:
                self._found_whole = {path: time.monotonic()}
                return
        if manifest.peer != self._id:  # somebody else may have it
            await self._gone(manifest.peer, manifest.round, context)
        self._on_damage(manifest.round, reason)
        await context.abort(
            grpc.StatusCode.DATA_LOSS, f"round {manifest.round} is damaged on the disk of peer {self._id}"
        )

    async def _cannot_read(self, context: Context) -> NoReturn:
        await context.abort(grpc.StatusCode.INTERNAL, f"peer {self._id} cannot read that file now")
        raise AssertionError("abort raises")

    async def _published(self, peer: int, number: int, context: Context) -> Manifest:
        """Manifest of a round that is kept here; ends the call otherwise."""
        if peer != self._id:
            try:
                return self._store.received_manifest(peer, number)
            except FileNotFoundError:
                await self._gone(peer, number, context)
        if number > self._status.state.round:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"peer {self._id} has not published round {number} yet; its last is {self._status.state.round}",
            )
        try:
            return self._store.manifest(number)
        except FileNotFoundError:
            await self._gone(peer, number, context)

    async def _gone(self, peer: int, number: int, context: Context) -> NoReturn:
        whose = "" if peer == self._id else f" of peer {peer}"
        await context.abort(grpc.StatusCode.NOT_FOUND, f"peer {self._id} does not keep round {number}{whose}")
        raise AssertionError("abort raises")


class Server:
    """A gRPC server that is started again should it break.

    One call whose method name is not UTF-8, be it of malice or of a flipped bit, ends a ``grpc.aio`` server for good.
    """

    def __init__(self, listen: str, servicer: PeerServicer) -> None:
        """Take the address; nothing is answered before :meth:`start`.

        Raises:
            PortTakenError: another process listens there, or the address is not of this machine.
        """
        self._listen = listen
        self._servicer = servicer
        self._is_stopping = False
        self._server = self._bound()
        self._supervision: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Serve."""
        await self._server.start()
        self._supervision = asyncio.create_task(self._supervise())
        logger.info("listening on %s", self._listen)

    async def stop(self, grace: float) -> None:
        """Take no more calls, and give those that run so many seconds."""
        self._is_stopping = True
        await self._server.stop(grace)
        if self._supervision is not None:
            await self._supervision
        # Calls that were cut off end a moment later than the server; gRPC prints a traceback for one that is cancelled
        # at that moment, as the end of the loop would do.
        if rest := [task for task in asyncio.all_tasks() if task.get_name() == _CALL]:
            await asyncio.wait(rest, timeout=grace)

    def _bound(self) -> grpc.aio.Server:
        server = grpc.aio.server(options=SERVER_OPTIONS)
        peer_pb2_grpc.add_PeerServicer_to_server(self._servicer, server)  # type: ignore[no-untyped-call]
        host, _, port = self._listen.rpartition(":")
        numeric = "127.0.0.1" if host == "localhost" else host
        try:
            bound = server.add_insecure_port(f"{numeric}:{port}")
        except RuntimeError:
            bound = 0
        if not bound:
            raise PortTakenError(
                f"cannot listen on {self._listen}: the port is taken by another process, or the address is not of this "
                f"machine; free the port, or give another address with --listen"
            )
        return server

    async def _supervise(self) -> None:
        while True:
            try:
                await self._server.wait_for_termination()
            except Exception as error:  # of any kind: whatever it was, the others need this server
                logger.warning("a call that cannot be read has ended the server (%s); starting it again", error)
                await asyncio.sleep(_REBIND)  # should it break again and again, not in a tight loop
            while not self._is_stopping:
                try:
                    self._server = self._bound()
                except PortTakenError:  # the broken server is about to let it go
                    await asyncio.sleep(_REBIND)
                    continue
                await self._server.start()
                break
            else:
                return


async def start_server(listen: str, servicer: PeerServicer) -> Server:
    """A server that serves already; errors as of :class:`Server`."""
    server = Server(listen, servicer)
    await server.start()
    return server
