"""A peer on 127.0.0.1 that publishes one snapshot again and again, and links to it: for tests over real sockets."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from processes import free_port

from crad_p2p.federation import Federation, build_federation
from crad_p2p.manifest import ClassStatistics, Manifest
from crad_p2p.results import RoundRecord
from crad_p2p.snapshot import CHECKPOINT_FILE, SNAPSHOT_FILE, Layout, TensorSpec
from peer._proto.crad.v1 import peer_pb2, peer_pb2_grpc
from peer.channels import Waits, dial
from peer.gate import Gate
from peer.intake import LARGEST_CHUNK_BYTES, Intake, document_digest
from peer.link import Link
from peer.refusals import Refusals
from peer.server import PeerServicer, Server, start_server
from peer.status import Status
from peer.store import Store

ME, PEER = 0, 1
#: A little over five of the largest chunks.
FLOATS = 5 * LARGEST_CHUNK_BYTES // 4 + 10
LAYOUT: Layout = {"weights": TensorSpec("F32", (FLOATS,))}
HEADER = b'{"weights": {"dtype": "F32", "shape": [%d], "data_offsets": [0, %d]}}' % (FLOATS, 4 * FLOATS)
SNAPSHOT = len(HEADER).to_bytes(8, "little") + HEADER + random.Random(0).randbytes(4 * FLOATS)
SIZE = len(SNAPSHOT)

WAITS = Waits(connect=5.0, no_progress=5.0)


def in_loop(test: Callable[..., Coroutine[Any, Any, None]], *, seconds: float = 40.0) -> Callable[..., None]:
    """Run an asynchronous test; one that hangs fails."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        asyncio.run(asyncio.wait_for(test(**fixtures), seconds))

    return run


def federation(port: int, *, host: str = "127.0.0.1", **changes: Any) -> Federation:
    """Peers 0 and 1; ``host`` and ``port`` are where the calling side finds peer 1."""
    addresses = {ME: "localhost:1", PEER: f"{host}:{port}"}
    peers = [{"id": i, "address": address, "arch": "cnn6"} for i, address in addresses.items()]
    return build_federation({"federation": "link-test", "peers": peers, **changes}, "test")


INTAKE = Intake(federation(1), {"cnn6": LAYOUT}, classes=2)


def manifest_of(number: int) -> Manifest:
    return Manifest(
        run=federation(1).digest(),
        peer=PEER,
        round=number,
        arch="cnn6",
        size=SIZE,
        sha256=hashlib.sha256(SNAPSHOT).hexdigest(),
        statistics=ClassStatistics(counts=(1, 1), hits=(0, 1), predicted=(1, 1)),
        consumed=(),
        model_round=number,
        missing=(),
        quarantined=(),
    )


class Noting(PeerServicer):
    """The real servicer; notes where snapshots were asked from."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.offsets: list[int] = []

    async def GetSnapshot(self, request: Any, context: Any) -> AsyncIterator[peer_pb2.Chunk]:
        self.offsets.append(request.offset)
        async for chunk in self.chunks(request, context):
            yield chunk

    async def chunks(self, request: Any, context: Any) -> AsyncIterator[peer_pb2.Chunk]:
        async for chunk in super().GetSnapshot(request, context):
            yield chunk


class Remote:
    """Peer 1: its store with published rounds, its status, and a server that can be stopped and started again."""

    def __init__(self, folder: Path, kind: type[Noting] = Noting, *, peer_id: int = PEER, **changes: Any) -> None:
        self.port = free_port()
        self.status = Status()
        self.store = Store(folder)
        self._federation = federation(self.port)
        self.store.open(self._federation, peer_id)
        self._peer_id = peer_id
        self.server: Server | None = None
        self._kind = kind
        self.configure(**changes)

    def configure(self, **changes: Any) -> None:
        """Settings for the next start."""
        self.servicer = self._kind(federation(self.port, **changes), self._peer_id, self.store, self.status)

    def gate(self) -> Gate:
        """What a server of the test's own hands its calls to."""
        return Gate(self.servicer, self._federation, None, Refusals())

    async def publish(self, number: int) -> None:
        staging = self.store.staging_dir(number)
        (staging / SNAPSHOT_FILE).write_bytes(SNAPSHOT)
        (staging / CHECKPOINT_FILE).touch()
        record = RoundRecord(peer=PEER, round=number, snapshot_sha256="", validation_accuracy=None)
        self.store.commit(staging, manifest_of(number), record)
        document = manifest_of(number).to_bytes()
        self.status.update(round=number, manifest=document, manifest_sha256=document_digest(document))

    async def start(self, host: str = "127.0.0.1") -> None:
        self.server = await start_server(f"{host}:{self.port}", self.servicer)

    async def stop(self) -> None:
        if self.server is not None:
            await self.server.stop(grace=0)

    def close(self) -> None:
        self.store.close()


def prune(store: Store, keep: Iterable[int], received_from: int) -> None:
    """As a peer does after each round."""
    outdated = store.outdated(keep, received_from)
    store.keep_lineage(outdated)
    store.delete(outdated)


class Witness:
    """Keeps what a link reports, and waits for it."""

    def __init__(self) -> None:
        self.states: asyncio.Queue[peer_pb2.PeerState] = asyncio.Queue()
        self.connections: asyncio.Queue[bool] = asyncio.Queue()

    def link(self, port: int, waits: Waits = WAITS, **changes: Any) -> Link:
        return Link(
            federation(port, **changes),
            ME,
            PEER,
            waits,
            on_state=lambda peer, state: self.states.put_nowait(state) if peer == PEER else None,
            on_connection=lambda peer, up: self.connections.put_nowait(up) if peer == PEER else None,
        )

    async def state_with(self, test: Callable[[peer_pb2.PeerState], bool]) -> peer_pb2.PeerState:
        while not test(state := await asyncio.wait_for(self.states.get(), 10)):
            pass
        return state

    async def connection(self, up: bool) -> None:
        while await asyncio.wait_for(self.connections.get(), 15) is not up:
            pass


@asynccontextmanager
async def serving(
    tmp_path: Path, kind: type[Noting] = Noting, *, first: int = 0, rounds: int = 1, **options: Any
) -> Any:
    remote = Remote(tmp_path / "remote", kind, **options)
    try:
        for number in range(first, first + rounds):
            await remote.publish(number)
        await remote.start()
        yield remote
    finally:
        await remote.stop()
        remote.close()


@asynccontextmanager
async def linked(port: int, waits: Waits = WAITS, **changes: Any) -> AsyncIterator[Link]:
    link = Witness().link(port, waits, **changes)
    try:
        yield link
    finally:
        await link.close()


@asynccontextmanager
async def stub_of(port: int) -> AsyncIterator[Any]:
    channel = dial(f"127.0.0.1:{port}")
    try:
        yield peer_pb2_grpc.PeerStub(channel)  # type: ignore[no-untyped-call]
    finally:
        await channel.close()


async def stopped(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])


async def until(test: Callable[[], bool], seconds: float = 15.0) -> None:
    """A bounded poll."""
    async with asyncio.timeout(seconds):
        while not test():
            await asyncio.sleep(0.02)


async def serve_slowly(folder: str, host: str, pause: float) -> None:
    """Publish round 0 at an address of this machine, print the port, and serve until killed."""

    class Slow(Noting):
        async def chunks(self, request: Any, context: Any) -> AsyncIterator[peer_pb2.Chunk]:
            async for chunk in super().chunks(request, context):
                yield chunk
                await asyncio.sleep(pause)

    remote = Remote(Path(folder), Slow)
    await remote.publish(0)
    await remote.start(host)
    print(remote.port, flush=True)
    await asyncio.Event().wait()
