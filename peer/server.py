"""The service that the other peers call: reads the store and the status, changes nothing."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn, Protocol

import grpc
import grpc.aio
from cryptography.hazmat.primitives.serialization import Encoding

from crad_p2p import __version__
from crad_p2p.errors import CertificateError, CradError, IncompleteError, PortTakenError
from crad_p2p.federation import Federation
from crad_p2p.foreign import printable
from crad_p2p.manifest import Manifest
from crad_p2p.snapshot import SNAPSHOT_FILE, sha256_file
from peer._proto.crad.v1 import peer_pb2
from peer.accepting import make_server
from peer.binding import why_not_bound
from peer.channels import server_options
from peer.chunks import Pace, Piece
from peer.credentials import CA_FILE, CERTIFICATE_FILE, KEY_FILE
from peer.gate import SERVICE, Call, Gate
from peer.hello import PROTOCOL, agreed_document, describe_disagreement
from peer.intake import document_digest
from peer.refusals import Refusals
from peer.signatures import sign_greeting
from peer.status import Status
from peer.store import MANIFEST, Store
from peer.tls import Tls
from peer.waiting import to_the_end
from peer.witness import Witness

logger = logging.getLogger(__name__)

#: Seconds for which a file that has been found whole is not read again.
_TRUSTED = 5.0
#: What a failing disk gives.
_BROKEN = (errno.EIO, errno.EISDIR)
#: How gRPC names the tasks of its calls.
_CALL = "rpc_task"


class PeerServicer:
    """Answers from what is committed on disk. ``peer.gate`` has checked caller and request.

    Args:
        witness: what has been here of the peers that call.
        tls: to prove who answers; None without TLS.
        on_damage: called with a committed round whose snapshot turns out to be damaged on disk, and how.
        on_refusal: called with a peer that will not use a snapshot of this one, its round and digest, and why.
        on_follow: called with a peer that begins to watch this one.
    """

    def __init__(
        self,
        federation: Federation,
        peer_id: int,
        store: Store,
        status: Status,
        witness: Witness | None = None,
        tls: Tls | None = None,
        on_damage: Callable[[int, str], None] = lambda *_: None,
        on_refusal: Callable[[int, int, str, str], None] = lambda *_: None,
        on_follow: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.federation = federation
        self.tls = tls
        self._agreed = agreed_document(federation)
        self._id = peer_id
        self._store = store
        self._status = status
        self._witness = witness or Witness({})
        self._on_damage = on_damage
        self._on_refusal = on_refusal
        self._on_follow = on_follow
        self._checking = asyncio.Lock()
        self._found_whole: dict[Path, float] = {}  # when, on the monotonic clock
        self.bytes_sent = 0
        self.greeted: Counter[int] = Counter()  # how often each peer has said hello
        self.followed_since: dict[int, float] = {}  # who watches now, and since when on the monotonic clock
        self._callers: dict[str, int] = {}  # without TLS: who has last said hello on a connection

    async def Hello(self, request: peer_pb2.HelloRequest, call: Call) -> peer_pb2.HelloReply:
        """Both sides compare. The caller ends if it must; here a disagreement is said, and the run goes on."""
        if call.caller is None and request.peer in self.federation.ids:
            self._callers = {connection: peer for connection, peer in self._callers.items() if peer != request.peer} | {
                call.connection: request.peer
            }
        if request.peer in self.federation.ids:
            self.greeted[request.peer] += 1
        if difference := describe_disagreement(request, self.federation, self._id):
            call.note("calls with other settings", difference)  # as often as it likes
        reply = peer_pb2.HelloReply(
            peer=self._id,
            software=__version__,
            protocol=PROTOCOL,
            agreed=self._agreed,
            remembers=bool(self._witness.sightings),
            unix_time=time.time(),
        )
        if self.tls is not None:
            own = self.tls.credentials
            reply.certificate = own.certificate.public_bytes(Encoding.DER)
            reply.proof = sign_greeting(own, request.peer, request.nonce)
        if (seen := self._witness.sightings.get(request.peer)) is not None:
            reply.seen_round, reply.seen_sha256 = seen.round, seen.sha256
            with suppress(FileNotFoundError):  # a power cut may have taken it
                reply.seen_manifest = self._store.received_manifest(request.peer, seen.round).to_bytes()
        return reply

    async def Watch(self, request: peer_pb2.WatchRequest, call: Call) -> AsyncIterator[peer_pb2.PeerState]:
        who = self._callers.get(call.connection) if call.caller is None else call.caller
        if who is not None and who != self._id:
            self._status.follow(who)
            self._on_follow(who)
        begun = time.monotonic()
        if who is not None:
            self.followed_since[who] = begun
        try:
            async for state in self._status.watch(progress=request.progress):
                yield state
        finally:
            if who is not None and self.followed_since.get(who) == begun:  # a later one may be open
                del self.followed_since[who]

    async def Refuse(self, request: peer_pb2.RefuseRequest, call: Call) -> peer_pb2.RefuseReply:
        """Take note that a peer does not use a snapshot of this one."""
        who = self._callers.get(call.connection) if call.caller is None else call.caller
        if who is not None:
            self._on_refusal(who, request.round, request.sha256, printable(request.reason, 400))
        return peer_pb2.RefuseReply()

    async def GetManifest(self, request: peer_pb2.GetManifestRequest, call: Call) -> peer_pb2.GetManifestReply:
        manifest = await self._published(request.peer, request.round, call)
        document = manifest.to_bytes()
        return peer_pb2.GetManifestReply(document=document, manifest_sha256=document_digest(document))

    async def GetSnapshot(self, request: peer_pb2.GetSnapshotRequest, call: Call) -> AsyncIterator[Piece]:
        manifest = await self._published(request.peer, request.round, call)
        if request.sha256 != manifest.sha256:
            await call.abort(
                grpc.StatusCode.NOT_FOUND,
                f"round {request.round} of peer {request.peer} has sha256 {manifest.sha256}, not "
                f"{printable(request.sha256[:64])}",
            )
        if request.offset > manifest.size:
            await call.abort(
                grpc.StatusCode.OUT_OF_RANGE, f"offset {request.offset} lies beyond the file's {manifest.size} bytes"
            )
        own = request.peer == self._id
        path = (
            self._store.round_dir(request.round) / SNAPSHOT_FILE
            if own
            else self._store.received_snapshot_path(request.peer, request.round)
        )
        if request.recheck:
            await self._check(path, manifest, call)
        try:
            # The open file stays readable to its end even if the round is deleted meanwhile.
            with path.open("rb", buffering=0) as file:
                offset, pace = request.offset, Pace()
                while True:
                    piece = Piece(offset, os.pread(file.fileno(), pace.next(), offset))
                    if not (count := len(piece.data)):
                        break
                    yield piece
                    offset += count
                    self.bytes_sent += count
                    pace.took(count, time.monotonic())
        except FileNotFoundError:
            await self._gone(request.peer, request.round, call)
        except OSError as error:
            logger.warning("%s cannot be read: %s", path, error.strerror)
            if error.errno in _BROKEN:
                await self._check(path, manifest, call)
            await self._cannot_read(call)

    async def _check(self, path: Path, manifest: Manifest, call: Call) -> None:
        """End the call if a file is not, or not any more, what its manifest says."""
        reason = ""
        async with self._checking:  # however many ask, one is read at a time, and not anew for each of them
            if time.monotonic() < self._found_whole.get(path, -math.inf) + _TRUSTED:
                return
            try:
                if await to_the_end(asyncio.to_thread(sha256_file, path)) != manifest.sha256:
                    reason = f"{SNAPSHOT_FILE} does not have the digest that {MANIFEST} says"
            except FileNotFoundError:
                await self._gone(manifest.peer, manifest.round, call)
            except OSError as error:
                if error.errno not in _BROKEN:  # too many open files, perhaps: nothing is known of this one
                    await self._cannot_read(call)
                reason = f"{SNAPSHOT_FILE}: {error.strerror}"
            if not reason:
                now = time.monotonic()
                fresh = {path: at for path, at in self._found_whole.items() if now < at + _TRUSTED}
                self._found_whole = {**fresh, path: now}
                return
        if manifest.peer != self._id:  # somebody else may have it
            await self._gone(manifest.peer, manifest.round, call)
        self._on_damage(manifest.round, reason)
        await call.abort(grpc.StatusCode.DATA_LOSS, f"round {manifest.round} is damaged on the disk of peer {self._id}")

    async def _cannot_read(self, call: Call) -> NoReturn:
        await call.abort(grpc.StatusCode.INTERNAL, f"peer {self._id} cannot read that file now")

    async def _published(self, peer: int, number: int, call: Call) -> Manifest:
        """Manifest of a round that is kept here; ends the call otherwise."""
        if peer != self._id:
            try:
                return self._store.received_manifest(peer, number)
            except FileNotFoundError:
                await self._gone(peer, number, call)
        if number > self._status.state.round:
            await call.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"peer {self._id} has not published round {number} yet; its last is {self._status.state.round}",
            )
        try:
            return self._store.manifest(number)
        except FileNotFoundError:
            await self._gone(peer, number, call)

    async def _gone(self, peer: int, number: int, call: Call) -> NoReturn:
        whose = "" if peer == self._id else f" of peer {peer}"
        await call.abort(grpc.StatusCode.NOT_FOUND, f"peer {self._id} does not keep round {number}{whose}")


class Servicer(Protocol):
    """Has a method for each call beside these, as ``peer.gate`` says."""

    federation: Federation
    tls: Tls | None


class Server:
    """The gRPC server of one peer."""

    def __init__(self, listen: str, servicer: Servicer, refusals: Refusals | None = None) -> None:
        """Take the address; nothing is answered before :meth:`start`.

        Raises:
            PortTakenError: another process listens there, or the address is not of this machine.
            CertificateError: gRPC does not take the certificate, the key or the CA's certificates.
        """
        self._listen = listen
        self._tls = servicer.tls
        self._members = len(servicer.federation.ids)
        self._gate = Gate(servicer, servicer.federation, servicer.tls, refusals or Refusals())
        self._server = self._bound()

    async def start(self) -> None:
        """Serve."""
        await self._server.start()
        logger.info("listening on %s", self._listen)

    async def stop(self, grace: float) -> None:
        """Take no more calls, and give those that run so many seconds."""
        await self._server.stop(grace)
        # Calls that were cut off end a moment later than the server; gRPC prints a traceback for one that is cancelled
        # at that moment, as the end of the loop would do.
        if rest := [task for task in asyncio.all_tasks() if task.get_name() == _CALL]:
            await asyncio.wait(rest, timeout=grace)

    def _bound(self) -> grpc.aio.Server:
        host, _, port = self._listen.rpartition(":")
        numeric = "127.0.0.1" if host == "localhost" else host
        server = self._bound_to(f"{numeric}:{port}", self._tls)
        if server is None:
            raise self._why_not(numeric)
        return server

    def _bound_to(self, address: str, tls: Tls | None) -> grpc.aio.Server | None:
        """A server with this address; None if gRPC does not come to have it, for a reason that it does not tell."""
        options, gate = server_options(self._members), self._gate
        server = make_server(options, SERVICE, gate.handlers, gate.refuse_unknown)
        server.add_generic_rpc_handlers((gate,))
        try:
            if tls is None:
                bound = server.add_insecure_port(address)
            else:
                bound = server.add_secure_port(address, tls.server_credentials())
        except RuntimeError:
            return None
        return server if bound else None

    def _why_not(self, host: str) -> CradError:
        if (taken := why_not_bound(self._listen)) is not None:
            return taken
        # A port that nobody can have taken.
        if self._tls is not None and self._bound_to(f"{host}:0", None) and not self._bound_to(f"{host}:0", self._tls):
            folder = self._tls.credentials.folder
            return CertificateError(
                f"{folder}: gRPC does not take what is in {CA_FILE}, {CERTIFICATE_FILE} or {KEY_FILE}, though each can "
                f"be read; expected files as 'crad-mesh certs' makes them: see with 'crad-mesh certs inspect {folder}' "
                f"what is in them, and ask whoever runs the CA for a certificate of 'crad-mesh certs sign'"
            )
        return PortTakenError(
            f"cannot listen on {self._listen}: the port was taken just now; start the same command again, or give "
            f"another address with --listen"
        )

    async def watch(self) -> NoReturn:
        """Wait until the server ends by itself, which it does not do.

        Raises:
            IncompleteError: it has; whoever has a call open keeps the address taken, so only a new process can go on.
        """
        ending = asyncio.ensure_future(self._server.wait_for_termination())
        try:
            await asyncio.shield(ending)  # cancelled, it would take the server's stop with it
            reason = "it was stopped"
        except Exception as error:  # of any kind: gRPC says nothing of what it may be
            reason = f"{type(error).__name__}: {error}"
        raise IncompleteError(
            f"the gRPC server on {self._listen} has ended ({reason}); start the same command again to continue"
        )


async def start_server(listen: str, servicer: Servicer) -> Server:
    """A server that serves already; errors as of :class:`Server`."""
    server = Server(listen, servicer)
    await server.start()
    return server
