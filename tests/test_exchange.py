"""What is fetched of another peer, once and in the right version, and what is given up."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from wire import (
    INTAKE,
    ME,
    PEER,
    SNAPSHOT,
    WAITS,
    Noting,
    Remote,
    federation,
    in_loop,
    manifest_of,
    prune,
    serving,
    until,
)

from crad_p2p.manifest import ClassStatistics
from peer import events as e
from peer._proto.crad.v1 import peer_pb2
from peer.exchange import Exchange
from peer.intake import document_digest
from peer.status import Status
from peer.store import Store
from peer.witness import Sighting, Witness


class Here:
    """This peer's side of the link to peer 1."""

    def __init__(self, folder: Path, port: int, *, may_lose: bool) -> None:
        self.events: list[e.Event] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.store = Store(folder / "here")
        self.store.open(federation(port), ME)
        self.exchange = Exchange(
            federation(port),
            ME,
            self.store,
            Status(),
            Witness({}),
            tls=None,
            tell=self.events.append,
            spawn=self._spawn,
            may_lose=may_lose,
            waits=WAITS,
        )
        self.exchange.use(INTAKE, peer_pb2.Data())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        self.tasks.append(asyncio.ensure_future(work))
        return self.tasks[-1]


@asynccontextmanager
async def exchanging(remote: Remote, folder: Path, *, may_lose: bool = False) -> AsyncIterator[Here]:
    here = Here(folder, remote.port, may_lose=may_lose)
    try:
        yield here
    finally:
        for task in here.tasks:
            task.cancel()
        if here.tasks:
            await asyncio.wait(here.tasks)
        await here.exchange.close()
        here.store.close()


@in_loop
async def test_manifest_then_snapshot_and_both_are_remembered(tmp_path: Path) -> None:
    async with serving(tmp_path) as remote, exchanging(remote, tmp_path) as here:
        here.exchange.fetch(e.FetchManifest(PEER, 0))
        await until(lambda: here.events == [e.ManifestHeld(PEER, 0)])
        assert here.store.load_seen() == {}  # only bytes that are here count
        here.exchange.fetch(e.FetchSnapshot(PEER, 0))
        await until(lambda: here.events[1:] == [e.SnapshotHeld(PEER, 0, 0)])
        assert here.store.received_snapshot_path(PEER, 0).read_bytes() == SNAPSHOT
        assert here.store.load_seen() == {PEER: Sighting(0, hashlib.sha256(SNAPSHOT).hexdigest())}


@in_loop
async def test_the_way_to_another_peer(tmp_path: Path) -> None:
    """As the log speaks of it when nothing changes."""
    async with serving(tmp_path) as remote, exchanging(remote, tmp_path) as here:
        address = f"127.0.0.1:{remote.port}"
        way = here.exchange.ways({})[PEER]
        assert (way.address, way.down_since is not None, way.calls_since) == (address, True, None)
        assert here.exchange.ways({PEER: time.monotonic()})[PEER].calls_since is not None
        remote.status.update(phase="wait", explanation="round 1 waits")
        here.exchange.watch()
        await until(lambda: here.exchange.ways({})[PEER].says == "round 1 waits")
        way = here.exchange.ways({PEER: time.monotonic()})[PEER]
        assert (way.down_since, way.calls_since, way.is_busy) == (None, None, False)
        here.exchange.fetch(e.FetchManifest(PEER, 0))
        here.exchange.fetch(e.FetchSnapshot(PEER, 0))
        await until(lambda: e.SnapshotHeld(PEER, 0, 0) in here.events)
        assert here.exchange.ways({})[PEER].is_busy  # something has come
        await remote.stop()
        await until(lambda: here.exchange.ways({})[PEER].down_since is not None)
        await until(lambda: "Connection refused" in here.exchange.ways({})[PEER].reason)


@in_loop
async def test_what_is_asked_for_twice_is_fetched_once(tmp_path: Path) -> None:
    async with serving(tmp_path) as remote, exchanging(remote, tmp_path) as here:
        here.store.save_received_manifest(manifest_of(0))
        for _ in range(3):
            here.exchange.fetch(e.FetchSnapshot(PEER, 0))
        await until(lambda: here.events == [e.SnapshotHeld(PEER, 0, 0)])
        assert len(here.tasks) == 1
        assert remote.servicer.offsets == [0]
        here.exchange.fetch(e.FetchSnapshot(PEER, 0))  # in a later round: it is here
        await until(lambda: len(here.events) == 2)
        assert remote.servicer.offsets == [0]


@in_loop
async def test_old_fetches_end_when_their_round_is_forgotten(tmp_path: Path) -> None:
    async with serving(tmp_path) as remote, exchanging(remote, tmp_path) as here:
        here.store.save_received_manifest(manifest_of(3))  # which is not published yet, so it goes on for ever
        here.exchange.fetch(e.FetchSnapshot(PEER, 3))
        await asyncio.sleep(0)
        await asyncio.wait_for(here.exchange.forget_before(4), 10)
        assert here.tasks[0].cancelled()
        assert here.events == []


@pytest.mark.parametrize("number", [0, federation(1).rounds])
def test_what_is_told_of_the_last_round_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Its owner may leave then. Earlier rounds can be fetched again."""

    @in_loop
    async def run() -> None:
        done: list[object] = []
        async with serving(tmp_path, first=number) as remote, exchanging(remote, tmp_path) as here:
            monkeypatch.setattr("peer.store.os.fsync", lambda fd: done.append(Path(f"/proc/self/fd/{fd}").readlink()))
            monkeypatch.setattr(here.exchange, "_tell", done.append)
            here.exchange.fetch(e.FetchManifest(PEER, number))
            await until(lambda: e.ManifestHeld(PEER, number) in done)
            here.exchange.fetch(e.FetchSnapshot(PEER, number))
            await until(lambda: e.SnapshotHeld(PEER, number, number) in done)
            manifest = here.store.received_manifest_path(PEER, number)
            snapshot = here.store.received_snapshot_path(PEER, number)
        is_last = number > 0
        first, second = done.index(e.ManifestHeld(PEER, number)), done.index(e.SnapshotHeld(PEER, number, number))
        assert (manifest in done[:first]) is (manifest.parent in done[:first]) is is_last
        assert (snapshot in done[first:second]) is (snapshot.parent in done[first:second]) is is_last

    run()


@in_loop
async def test_what_was_refused_before_a_restart_is_not_fetched_again(tmp_path: Path) -> None:
    async with serving(tmp_path) as remote, exchanging(remote, tmp_path) as here:
        here.store.save_received_manifest(manifest_of(0))
        here.store.received_snapshot_path(PEER, 0).with_suffix(".refused").write_bytes(SNAPSHOT)
        here.exchange.fetch(e.FetchSnapshot(PEER, 0))
        await until(lambda: here.events == [e.SnapshotRefused(PEER, 0)])
        assert remote.servicer.offsets == []
        here.store.received_snapshot_path(PEER, 0).with_suffix(".refused").write_bytes(b"of another digest")
        here.exchange.fetch(e.FetchSnapshot(PEER, 0))
        await until(lambda: here.events[1:] == [e.SnapshotHeld(PEER, 0, 0)])


@pytest.mark.parametrize("lost", [False, True])
def test_a_last_snapshot_that_its_owner_does_not_have_whole_is_given_up(tmp_path: Path, lost: bool) -> None:
    """Nobody learns from it, so it must not keep anybody from leaving, nor end a peer."""
    last = federation(1).rounds

    @in_loop
    async def run() -> None:
        async with serving(tmp_path, first=last) as remote, exchanging(remote, tmp_path) as here:
            here.exchange.fetch(e.FetchManifest(PEER, last))
            await until(lambda: here.events == [e.ManifestHeld(PEER, last)])
            path = remote.store.round_dir(last) / "snapshot.safetensors"
            if lost:
                path.unlink()
            else:
                path.write_bytes(SNAPSHOT[:-1] + b"?")
            here.exchange.fetch(e.FetchSnapshot(PEER, last))
            await until(lambda: here.events[1:] == [e.Gone(PEER, last)], 30)

    run()


@in_loop
async def test_the_last_snapshot_of_a_peer_that_leaves_is_given_up(tmp_path: Path) -> None:
    last = federation(1).rounds
    async with serving(tmp_path) as remote, exchanging(remote, tmp_path) as here:
        watching = here.exchange.watch()
        here.store.save_received_manifest(manifest_of(last))
        here.store.save_received_manifest(manifest_of(3))
        for number in (3, last):  # neither is published, so both go on
            here.exchange.fetch(e.FetchSnapshot(PEER, number))
        await until(lambda: e.Connected(PEER) in here.events)
        remote.status.update(round=3, leaving=True)  # not believed
        await until(lambda: e.Disconnected(PEER) in here.events)
        here.events.clear()
        await until(lambda: e.Connected(PEER) in here.events)  # and called again
        assert e.Gone(PEER, last) not in here.events
        remote.status.update(round=last, leaving=True)
        await until(lambda: e.Gone(PEER, last) in here.events)
        earlier, _ = (task for task in here.tasks if task not in watching)
        assert not earlier.done()  # it may be needed: the peer may be started again
        here.events.clear()
        here.exchange.fetch(e.FetchSnapshot(PEER, last))
        assert here.events == [e.Gone(PEER, last)]
        remote.status.update(leaving=False)  # it was started again
        await until(lambda: PEER not in here.exchange._left)
        here.events.clear()
        here.exchange.fetch(e.FetchSnapshot(PEER, last))
        assert here.events == []


@pytest.mark.parametrize("may_lose", [False, True])
def test_a_round_that_is_gone(tmp_path: Path, may_lose: bool, caplog: pytest.LogCaptureFixture) -> None:
    @in_loop
    async def run() -> None:
        async with (
            serving(tmp_path, rounds=3) as remote,
            exchanging(remote, tmp_path, may_lose=may_lose) as here,
        ):
            prune(remote.store, [2, 1], received_from=0)
            here.exchange.fetch(e.FetchManifest(PEER, 0))
            if may_lose:
                await until(lambda: here.events == [e.Gone(PEER, 0)])
            else:  # nothing can go on without it, and its owner alone can mend that
                await until(lambda: "round 0 is needed here of peer 1" in caplog.text)
                assert "waiting for it" in caplog.text
                assert not here.tasks[0].done()
                assert here.events == []

    run()


@in_loop
async def test_a_round_that_its_owner_lost_and_trained_again_is_taken_as_it_is_now_and_reported(tmp_path: Path) -> None:
    """Nobody had fetched the first version, or --recover would have brought it back."""
    async with serving(tmp_path) as remote, exchanging(remote, tmp_path) as here:
        first = manifest_of(0).model_copy(update={"sha256": "0" * 64})
        here.store.save_received_manifest(first)
        here.exchange.fetch(e.FetchManifest(PEER, 0))
        here.exchange.fetch(e.FetchSnapshot(PEER, 0))
        await until(lambda: e.SnapshotHeld(PEER, 0, 0) in here.events)
        assert here.store.received_manifest(PEER, 0) == manifest_of(0)
        assert here.store.received_snapshot_path(PEER, 0).read_bytes() == SNAPSHOT
        assert here.exchange.consumed(PEER, 0).sha256 == manifest_of(0).sha256
        (evidence,) = here.store.conflicts()
        tree = json.loads(evidence.read_text())
        assert (tree["first"], tree["second"]) == ("0" * 64, manifest_of(0).sha256)
        assert [json.loads(document)["sha256"] for document in tree["manifests"].values()] == [
            manifest_of(0).sha256,
            "0" * 64,
        ]


@in_loop
async def test_counts_must_stay_the_same_also_after_a_restart(tmp_path: Path) -> None:
    async with serving(tmp_path, rounds=2) as remote, exchanging(remote, tmp_path) as here:
        other = ClassStatistics(counts=(5, 5), hits=(0, 1), predicted=(5, 5))
        here.store.save_received_manifest(manifest_of(0).model_copy(update={"statistics": other}))
        here.exchange.watch()
        here.exchange.fetch(e.FetchManifest(PEER, 1))
        await until(lambda: e.SnapshotRefused(PEER, 1, manifest=True) in here.events)
        assert "manifest counts 1 validation samples of class 0, and an earlier one 5" in here.exchange.reasons[PEER]
        assert not here.store.received_manifest_path(PEER, 1).exists()


@in_loop
async def test_a_peer_that_shows_ever_another_snapshot_and_never_has_it_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would be one more line in the lineage."""

    class Fickle(Noting):
        shown = 0

        async def GetManifest(self, request: Any, _: Any) -> peer_pb2.GetManifestReply:
            self.shown += 1
            other = hashlib.sha256(bytes([self.shown])).hexdigest()
            document = manifest_of(request.round).model_copy(update={"sha256": other}).to_bytes()
            return peer_pb2.GetManifestReply(document=document, manifest_sha256=document_digest(document))

        async def chunks(self, _: Any, context: Any) -> AsyncIterator[peer_pb2.Chunk]:
            await context.abort(grpc.StatusCode.NOT_FOUND, "not here")
            yield

    monkeypatch.setattr("peer.exchange._ASK_AGAIN", 0.0)
    async with serving(tmp_path, Fickle) as remote, exchanging(remote, tmp_path) as here:
        here.exchange.fetch(e.FetchSnapshot(PEER, 0))
        await until(lambda: here.events == [e.SnapshotRefused(PEER, 0)], 30)
        assert "replaced 6 times" in here.exchange.reasons[PEER]
        assert remote.servicer.shown < 10
