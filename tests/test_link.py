"""Link and server over real sockets on 127.0.0.1: agreement, transfers that are cut, and peers that misbehave."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from wire import (
    INTAKE,
    LAYOUT,
    ME,
    PEER,
    SIZE,
    SNAPSHOT,
    WAITS,
    Noting,
    Remote,
    Witness,
    federation,
    free_port,
    in_loop,
    linked,
    manifest_of,
    prune,
    serving,
    stopped,
    stub_of,
    until,
)

import peer.attempts
import peer.link
import peer.server
from crad_p2p import __version__
from crad_p2p.errors import IncompleteError, PeersDisagreeError, PortTakenError
from crad_p2p.snapshot import SnapshotError, TensorSpec
from launch.proxy import Proxy
from peer._proto.crad.v1 import peer_pb2, peer_pb2_grpc
from peer.attempts import between_tries
from peer.channels import Waits, client_options
from peer.chunks import LEAST_BYTES
from peer.hello import PROTOCOL
from peer.intake import LARGEST_CHUNK_BYTES, MAX_REQUEST_BYTES, NONCE_BYTES, Intake, document_digest
from peer.link import Link, greeting_slots
from peer.server import start_server
from peer.status import Status
from peer.turns import Slots


@pytest.fixture(autouse=True)
def _log_everything(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


# --- calls that the other side cancels --------------------------------------------------------------------------------


class Cancelling(Noting):
    """Cancels the first call of each kind, as a server does that shuts down under load."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.cancelled: set[str] = set()

    async def once(self, name: str, context: Any) -> None:
        if name not in self.cancelled:
            self.cancelled.add(name)
            await context.abort(grpc.StatusCode.CANCELLED, "going away")

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[peer_pb2.PeerState]:
        await self.once("Watch", context)
        async for state in super().Watch(request, context):
            yield state

    async def GetManifest(self, request: Any, context: Any) -> peer_pb2.GetManifestReply:
        await self.once("GetManifest", context)
        return await super().GetManifest(request, context)

    async def chunks(self, request: Any, context: Any) -> AsyncIterator[peer_pb2.Chunk]:
        await self.once("GetSnapshot", context)
        async for chunk in super().chunks(request, context):
            yield chunk


@in_loop
async def test_a_cancelled_call_is_made_again(tmp_path: Path) -> None:
    witness = Witness()
    async with serving(tmp_path, Cancelling) as remote:
        link = witness.link(remote.port)
        task = asyncio.create_task(link.watch())
        try:
            await witness.state_with(lambda state: state.round == 0)
            manifest = await asyncio.wait_for(link.manifest(0, INTAKE), 10)
            await asyncio.wait_for(link.snapshot(manifest, tmp_path / "1.safetensors", INTAKE), 10)
        finally:
            await stopped(task)
            await link.close()
        assert remote.servicer.cancelled == {"Watch", "GetManifest", "GetSnapshot"}
    assert (tmp_path / "1.safetensors").read_bytes() == SNAPSHOT


# --- hello ------------------------------------------------------------------------------------------------------------


@in_loop
async def test_peers_that_agree_are_connected_and_hear_from_one_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    witness = Witness()
    async with serving(tmp_path) as remote:
        link = witness.link(remote.port)
        task = asyncio.create_task(link.watch())
        await witness.connection(True)
        assert (await witness.state_with(lambda _: True)).round == 0
        assert caplog.messages.count(f"peer 1 at 127.0.0.1:{remote.port}: connected") == 1
        await stopped(task)
        await link.close()


async def refusal_of(port: int, **changes: Any) -> str:
    """What the link says of a peer that it will not talk to."""
    async with linked(port, **changes) as link:
        with pytest.raises(PeersDisagreeError) as raised:
            await link.watch()
    return str(raised.value)


@pytest.mark.parametrize(
    ("there", "here", "difference"),
    [
        ({"seed": 1}, {"seed": 2}, "seed is 1 in the file of peer 1 and 2 in the file of peer 0"),
        (
            {"method": {"temperature": 4.0}},
            {},
            "method.temperature is 4.0 in the file of peer 1 and 3.0 in the file of peer 0",
        ),
        (
            {},
            {"federation": "other"},
            'federation is "link-test" in the file of peer 1 and "other" in the file of peer 0',
        ),
    ],
)
@in_loop
async def test_another_field_is_told_with_both_values(
    tmp_path: Path, there: dict[str, Any], here: dict[str, Any], difference: str
) -> None:
    async with serving(tmp_path, **there) as remote:
        found = await refusal_of(remote.port, **here)
        assert found.startswith(f"peers 0 and 1 were started with different settings: {difference}; give both")


@in_loop
async def test_another_peer_at_the_address_is_told(tmp_path: Path) -> None:
    async with serving(tmp_path, rounds=0, peer_id=7) as remote:
        expected = f"127.0.0.1:{remote.port} should be peer 1, and answers as peer 7;"
        assert expected in await refusal_of(remote.port)


@in_loop
async def test_another_version_is_told_with_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer.server, "__version__", "9.9.9")

    async with serving(tmp_path) as remote:
        expected = f"the software version is 9.9.9 on peer 1 and {__version__} on peer 0;"
        assert expected in await refusal_of(remote.port)


def answering(agreed: bytes) -> type[Noting]:
    """A peer that says this instead of its settings."""

    class Odd(Noting):
        async def Hello(self, request: Any, context: Any) -> peer_pb2.HelloReply:
            del request, context
            return peer_pb2.HelloReply(peer=PEER, software=__version__, protocol=PROTOCOL, agreed=agreed)

    return Odd


@pytest.mark.parametrize(
    "agreed",
    [b"", b"{", b"\xff\xfe\xff", b"[]", b"null", b"7", b"[" * 100_000],
    ids=["empty", "torn", "not text", "a list", "null", "a number", "deep"],
)
@in_loop
async def test_a_peer_that_says_nothing_sensible_is_refused(tmp_path: Path, agreed: bytes) -> None:
    async with serving(tmp_path, answering(agreed)) as remote:
        assert "peer 1 does not say what it runs" in await refusal_of(remote.port)


@in_loop
async def test_a_peer_that_had_agreed_and_changes_its_mind_is_only_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    witness = Witness()
    async with serving(tmp_path) as remote:
        link = witness.link(remote.port)
        task = asyncio.create_task(link.watch())
        await witness.connection(True)
        await remote.stop()
        remote.configure(seed=5)
        await remote.start()
        await witness.connection(False)
        await until(lambda: "was started with other settings: seed is 5 in" in caplog.text)
        assert not task.done()
        await remote.stop()
        remote.configure()
        await remote.start()
        await witness.connection(True)
        await stopped(task)
        await link.close()


# --- watch ------------------------------------------------------------------------------------------------------------


@in_loop
async def test_watch_sends_the_state_at_once_then_changes_and_ends_after_leaving(tmp_path: Path) -> None:
    async with serving(tmp_path) as remote, stub_of(remote.port) as stub:
        remote.status.update(explanation="round 1 waits", validation_accuracy=0.25)
        call = stub.Watch(peer_pb2.WatchRequest(progress=True))
        first = await asyncio.wait_for(call.read(), 5)
        assert (first.round, first.collected, first.phase) == (0, -1, "start")
        assert (first.explanation, first.validation_accuracy) == ("round 1 waits", 0.25)
        assert not first.HasField("global_accuracy")
        remote.status.update(round=1, collected=0, phase="train", step=2, steps=5, validation_accuracy=None)
        second = await asyncio.wait_for(call.read(), 5)
        assert (second.round, second.collected, second.phase, second.step, second.steps) == (1, 0, "train", 2, 5)
        assert not second.HasField("validation_accuracy")
        assert not second.leaving
        remote.status.update(phase="done", leaving=True)
        assert (await asyncio.wait_for(call.read(), 5)).leaving
        assert await asyncio.wait_for(call.read(), 5) is grpc.aio.EOF
        assert await remote.status.drained(5)


@in_loop
async def test_progress_is_told_at_a_measured_pace(tmp_path: Path) -> None:
    async with serving(tmp_path) as remote, stub_of(remote.port) as stub:
        call = stub.Watch(peer_pb2.WatchRequest(progress=True))
        await call.read()

        async def work() -> None:
            for step in range(1, 101):
                remote.status.update(step=step, steps=100)
                await asyncio.sleep(0.005)

        working = asyncio.create_task(work())
        seen = []
        while not seen or seen[-1] < 100:
            seen.append((await asyncio.wait_for(call.read(), 5)).step)
        await working
        assert seen == sorted(seen)
        assert len(seen) < 30
        call.cancel()
        assert await remote.status.drained(5)


@in_loop
async def test_a_new_round_is_told_at_once(tmp_path: Path) -> None:
    async with serving(tmp_path, rounds=0) as remote, stub_of(remote.port) as stub:
        call = stub.Watch(peer_pb2.WatchRequest())
        await call.read()
        start = time.monotonic()
        for number in range(30):
            remote.status.update(round=number)
            while (await asyncio.wait_for(call.read(), 5)).round < number:
                pass
        assert time.monotonic() - start < 1.5  # at the pace of progress reports it would be three seconds
        call.cancel()


@pytest.mark.parametrize("progress", [True, False])
@in_loop
async def test_streams_end_without_a_word_of_leaving_when_a_peer_is_stopped(tmp_path: Path, progress: bool) -> None:
    async with serving(tmp_path) as remote, stub_of(remote.port) as stub:
        call = stub.Watch(peer_pb2.WatchRequest(progress=progress))
        assert not (await asyncio.wait_for(call.read(), 5)).leaving
        remote.status.close()
        assert await asyncio.wait_for(call.read(), 5) is grpc.aio.EOF
        assert await remote.status.drained(5)


@in_loop
async def test_peers_are_not_told_of_progress(tmp_path: Path) -> None:
    async with serving(tmp_path) as remote, stub_of(remote.port) as stub:
        call = stub.Watch(peer_pb2.WatchRequest())
        await call.read()
        for step in range(1, 50):
            remote.status.update(step=step, steps=50)
            await asyncio.sleep(0.01)
        remote.status.update(collected=0)
        assert (await asyncio.wait_for(call.read(), 5)).collected == 0
        call.cancel()


@in_loop
async def test_a_slow_reader_sees_the_latest_state_not_every_one(tmp_path: Path) -> None:
    async with serving(tmp_path) as remote, stub_of(remote.port) as stub:
        call = stub.Watch(peer_pb2.WatchRequest(progress=True))
        await call.read()
        for step in range(1, 200):
            remote.status.update(step=step, steps=199)
        seen = []
        while not seen or seen[-1] < 199:
            seen.append((await asyncio.wait_for(call.read(), 5)).step)
        assert len(seen) < 20
        assert seen == sorted(seen)
        call.cancel()
        assert await remote.status.drained(5)


@in_loop
async def test_a_peer_that_leaves_is_watched_again_when_it_comes_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    witness, last = Witness(), federation(1).rounds
    async with serving(tmp_path) as remote:
        link = witness.link(remote.port)
        task = asyncio.create_task(link.watch())
        await witness.connection(True)
        remote.status.update(round=last, leaving=True)
        await witness.state_with(lambda state: state.leaving)
        await witness.connection(False)
        await witness.connection(True)  # it is asked again, and says the same
        assert caplog.text.count("connected") == 1
        assert "trying again" not in caplog.text
        remote.status.update(round=last, leaving=False)
        await witness.state_with(lambda state: not state.leaving)
        await stopped(task)
        await link.close()


@in_loop
async def test_a_link_that_goes_down_comes_up_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    witness = Witness()
    async with serving(tmp_path) as remote:
        await remote.stop()
        link = witness.link(remote.port)
        task = asyncio.create_task(link.watch())  # started before its peer
        await witness.connection(False)
        await remote.start()
        await witness.connection(True)
        await remote.stop()
        await witness.connection(False)
        remote.status.update(round=1)
        await remote.start()
        await witness.connection(True)
        await witness.state_with(lambda state: state.round == 1)
        await stopped(task)
        await link.close()
    assert "peer 1 at 127.0.0.1:" in caplog.text


@in_loop
async def test_a_silent_watch_counts_as_down(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Silent(Noting):
        async def Watch(self, request: Any, context: Any) -> AsyncIterator[peer_pb2.PeerState]:
            del request, context
            yield self._status.state
            await asyncio.Event().wait()

    witness = Witness()
    async with serving(tmp_path, Silent) as remote:
        link = witness.link(remote.port, Waits(no_progress=0.3))
        task = asyncio.create_task(link.watch())
        await witness.connection(True)
        await witness.connection(False)
        await witness.connection(True)
        await stopped(task)
        await link.close()
    assert "nothing came for 0.3 s; trying again" in caplog.text


# --- manifests --------------------------------------------------------------------------------------------------------


@in_loop
async def test_a_manifest_is_asked_for_until_it_is_published(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Counting(Noting):
        calls = 0

        async def GetManifest(self, request: Any, context: Any) -> peer_pb2.GetManifestReply:
            self.calls += 1
            return await super().GetManifest(request, context)

    async with serving(tmp_path, Counting) as remote, linked(remote.port) as link:
        assert await link.manifest(0, INTAKE) == manifest_of(0)
        task = asyncio.create_task(link.manifest(1, INTAKE))
        await until(lambda: remote.servicer.calls >= 5)
        assert not task.done()
        await remote.publish(1)
        assert await task == manifest_of(1)
    assert caplog.text.count("peer 1 has not published round 1 yet; its last is 0") == 1  # said once, not at each try


def manifest_reply(document: bytes) -> peer_pb2.GetManifestReply:
    return peer_pb2.GetManifestReply(document=document, manifest_sha256=document_digest(document))


@in_loop
async def test_a_wrong_manifest_is_refused_and_asked_for_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class WrongAtFirst(Noting):
        calls = 0

        async def GetManifest(self, request: Any, context: Any) -> peer_pb2.GetManifestReply:
            self.calls += 1
            if self.calls == 1:
                return manifest_reply(manifest_of(5).to_bytes())
            return await super().GetManifest(request, context)

    async with serving(tmp_path, WrongAtFirst) as remote, linked(remote.port) as link:
        assert await link.manifest(0, INTAKE) == manifest_of(0)
        assert remote.servicer.calls == 2
    assert "manifest of round 0 of peer 1 refused: manifest says round 5, expected 0; trying again" in caplog.text


@in_loop
async def test_an_oversized_message_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class HugeAtFirst(Noting):
        calls = 0

        async def GetManifest(self, request: Any, context: Any) -> peer_pb2.GetManifestReply:
            self.calls += 1
            if self.calls == 1:
                return peer_pb2.GetManifestReply(document=bytes(2 * LARGEST_CHUNK_BYTES + 1))
            return await super().GetManifest(request, context)

    async with serving(tmp_path, HugeAtFirst) as remote, linked(remote.port) as link:
        assert await link.manifest(0, INTAKE) == manifest_of(0)
        async with stub_of(remote.port) as stub:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await stub.Hello(peer_pb2.HelloRequest(agreed=bytes(MAX_REQUEST_BYTES + 1)), timeout=5)
            assert raised.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "resource exhausted" in caplog.text


@in_loop
async def test_a_compressed_answer_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    remote = Remote(tmp_path / "remote")
    server = grpc.aio.server(compression=grpc.Compression.Gzip)
    server.add_generic_rpc_handlers((remote.gate(),))
    assert server.add_insecure_port(f"127.0.0.1:{remote.port}") == remote.port
    await server.start()
    witness = Witness()
    link = witness.link(remote.port)
    task = asyncio.create_task(link.watch())
    await until(lambda: "internal (" in caplog.text)
    assert not task.done()
    assert witness.states.empty()
    assert True not in [witness.connections.get_nowait() for _ in range(witness.connections.qsize())]
    await stopped(task)
    await link.close()
    await server.stop(grace=0)
    remote.close()
    assert "gzip" in caplog.text


@in_loop
async def test_a_compressed_request_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path) as remote:
        for compression, refused in ((grpc.Compression.NoCompression, False), (grpc.Compression.Gzip, True)):
            async with grpc.aio.insecure_channel(f"127.0.0.1:{remote.port}", compression=compression) as channel:
                stub = peer_pb2_grpc.PeerStub(channel)  # type: ignore[no-untyped-call]
                call = stub.Hello(peer_pb2.HelloRequest(agreed=bytes(100_000), nonce=bytes(NONCE_BYTES)), timeout=5)
                if not refused:
                    assert (await call).peer == PEER
                    continue
                with pytest.raises(grpc.aio.AioRpcError, match="gzip"):
                    await call


# --- snapshots --------------------------------------------------------------------------------------------------------


def arrived(path: Path) -> bool:
    assert not path.with_suffix(".partial").exists()
    return path.read_bytes() == SNAPSHOT


@in_loop
async def test_a_snapshot_arrives_whole_and_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "1.safetensors"
    async with serving(tmp_path) as remote, linked(remote.port) as link:
        await link.snapshot(manifest_of(0), path, INTAKE)
        assert arrived(path)
        assert remote.servicer.offsets == [0]
        assert link.bytes_received == remote.servicer.bytes_sent == SIZE > 5 * LEAST_BYTES


@in_loop
async def test_a_transfer_that_is_cut_is_resumed_where_it_was_cut(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "1.safetensors"
    async with (
        serving(tmp_path) as remote,
        Proxy(f"127.0.0.1:{remote.port}") as proxy,
        linked(proxy.port) as link,
    ):
        proxy.down.truncate = 3_500_000
        proxy.down.bandwidth = 10e6  # no faster than it is read: what gRPC holds unread is lost with the connection
        await link.snapshot(manifest_of(0), path, INTAKE)
        assert arrived(path)
        first, second = remote.servicer.offsets
        assert first == 0
        assert 3_000_000 < second < 3_500_000  # what had come is kept
        assert link.bytes_received == SIZE  # no byte was written twice
        assert proxy.down.passed < SIZE + 600_000
    assert "snapshot of round 0 of peer 1 cut at byte" in caplog.text


@in_loop
async def test_a_partial_file_of_an_earlier_process_is_resumed(tmp_path: Path) -> None:
    path = tmp_path / "1.safetensors"
    path.with_suffix(".partial").write_bytes(SNAPSHOT[:3_000_001])
    async with serving(tmp_path) as remote, linked(remote.port) as link:
        await link.snapshot(manifest_of(0), path, INTAKE)
        assert arrived(path)
        assert remote.servicer.offsets == [3_000_001]
        assert link.bytes_received == SIZE - 3_000_001


@in_loop
async def test_a_partial_file_that_is_whole_costs_no_transfer(tmp_path: Path) -> None:
    path = tmp_path / "1.safetensors"
    path.with_suffix(".partial").write_bytes(SNAPSHOT)
    async with serving(tmp_path) as remote, linked(remote.port) as link:
        await link.snapshot(manifest_of(0), path, INTAKE)
        assert arrived(path)
        assert link.bytes_received == remote.servicer.bytes_sent == 0


@in_loop
async def test_a_partial_file_of_something_else_is_fetched_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "1.safetensors"
    path.with_suffix(".partial").write_bytes(SNAPSHOT[:1000] + b"?" + SNAPSHOT[1001:3_000_000])
    async with serving(tmp_path) as remote, linked(remote.port) as link:
        await link.snapshot(manifest_of(0), path, INTAKE)
        assert arrived(path)
        assert remote.servicer.offsets == [3_000_000, 0]
    assert "refused: sha256 of the file is" in caplog.text


def chunk(offset: int, size: int = LARGEST_CHUNK_BYTES) -> peer_pb2.Chunk:
    return peer_pb2.Chunk(offset=offset, data=SNAPSHOT[offset : offset + size])


ENDLESS = [chunk(i * LARGEST_CHUNK_BYTES) for i in range(5)] + [
    peer_pb2.Chunk(offset=i * LARGEST_CHUNK_BYTES, data=bytes(LARGEST_CHUNK_BYTES)) for i in range(5, 12)
]
FLIPPED = [chunk(i * LARGEST_CHUNK_BYTES) for i in range(6)]
FLIPPED[4] = peer_pb2.Chunk(offset=4 * LARGEST_CHUNK_BYTES, data=bytes(LARGEST_CHUNK_BYTES))
HEADLESS = [chunk(i * LARGEST_CHUNK_BYTES) for i in range(6)]
HEADLESS[0] = peer_pb2.Chunk(offset=0, data=b"\xff" * 8 + SNAPSHOT[8:LARGEST_CHUNK_BYTES])


@pytest.mark.parametrize(
    ("chunks", "reason"),
    [
        (
            [chunk(0), chunk(2 * LARGEST_CHUNK_BYTES)],
            f"chunk of {LARGEST_CHUNK_BYTES} bytes at 2097152, expected one at 1048576",
        ),
        (
            [chunk(0), chunk(LARGEST_CHUNK_BYTES - 1)],
            f"chunk of {LARGEST_CHUNK_BYTES} bytes at 1048575, expected one at 1048576",
        ),
        ([chunk(1)], f"chunk of {LARGEST_CHUNK_BYTES} bytes at 1, expected one at 0"),
        ([chunk(0), chunk(LARGEST_CHUNK_BYTES, 0)], "Chunk with data 0 bytes, which cannot be"),
        ([chunk(0, LARGEST_CHUNK_BYTES + 1)], f"Chunk with data {LARGEST_CHUNK_BYTES + 1} bytes, which"),
        (ENDLESS, f"stream goes on beyond the {SIZE} bytes of the manifest"),
        ([chunk(0), chunk(LARGEST_CHUNK_BYTES)], f"file has {2 * LARGEST_CHUNK_BYTES} bytes, the manifest says {SIZE}"),
        ([], f"file has 0 bytes, the manifest says {SIZE}"),
        (FLIPPED, "sha256 of the file is"),
        (HEADLESS, "sha256 of the file is"),
    ],
    ids=["gap", "overlap", "late start", "empty", "overlong chunk", "overlong", "short", "nothing", "digest", "header"],
)
@in_loop
async def test_a_wrong_stream_is_refused_and_fetched_again_from_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, chunks: list[peer_pb2.Chunk], reason: str
) -> None:
    class WrongAtFirst(Noting):
        async def chunks(self, request: Any, context: Any) -> AsyncIterator[peer_pb2.Chunk]:
            real = super().chunks(request, context)
            if len(self.offsets) > 1:
                async for each in real:
                    yield each
                return
            for each in chunks:
                yield each

    path = tmp_path / "1.safetensors"
    async with serving(tmp_path, WrongAtFirst) as remote, linked(remote.port) as link:
        await link.snapshot(manifest_of(0), path, INTAKE)
        assert arrived(path)
        assert remote.servicer.offsets == [0, 0]
        assert link.bytes_received <= 2 * SIZE  # what goes beyond the manifest's size is not taken in
    assert f"snapshot of round 0 of peer 1 refused: {reason}" in caplog.text
    assert "fetching it again from the start" in caplog.text


@in_loop
async def test_a_snapshot_that_is_as_announced_but_of_another_layout_is_refused_for_good(tmp_path: Path) -> None:
    other = Intake(federation(1), {"cnn6": {**LAYOUT, "extra": TensorSpec("F32", (1,))}}, classes=2)
    path = tmp_path / "1.safetensors"
    async with serving(tmp_path) as remote, linked(remote.port) as link:
        with pytest.raises(SnapshotError, match="no tensor 'extra'"):
            await link.snapshot(manifest_of(0), path, other)
        assert remote.servicer.offsets == [0]  # not asked for again
    assert not path.exists()
    assert path.with_suffix(".refused").read_bytes() == SNAPSHOT


@in_loop
async def test_a_peer_that_is_away_does_not_keep_others_from_being_fetched(tmp_path: Path) -> None:
    slots = Slots(1, 60.0)
    async with serving(tmp_path) as remote:
        away, there = (Link(federation(port), ME, PEER, WAITS, slots=slots) for port in (free_port(), remote.port))
        task = asyncio.create_task(away.snapshot(manifest_of(0), tmp_path / "away.safetensors", INTAKE))
        try:
            for number in range(3):
                await asyncio.wait_for(there.snapshot(manifest_of(0), tmp_path / f"{number}.safetensors", INTAKE), 10)
            assert not task.done()
        finally:
            await stopped(task)
            await away.close()
            await there.close()
    assert there.transfer_seconds > 0


@in_loop
async def test_a_transfer_that_stands_still_is_resumed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class StandsStill(Noting):
        async def chunks(self, request: Any, context: Any) -> AsyncIterator[peer_pb2.Chunk]:
            async for each in super().chunks(request, context):
                yield each
                if len(self.offsets) == 1 and each.offset == LEAST_BYTES:
                    await asyncio.Event().wait()

    path = tmp_path / "1.safetensors"
    waits = Waits(no_progress=0.5)
    async with serving(tmp_path, StandsStill) as remote, linked(remote.port, waits) as link:
        await link.snapshot(manifest_of(0), path, INTAKE)
        assert arrived(path)
        assert remote.servicer.offsets == [0, 2 * LEAST_BYTES]
        assert link.bytes_received == SIZE
    assert f"cut at byte {2 * LEAST_BYTES}: nothing came for 0.5 s; resuming" in caplog.text


@in_loop
async def test_a_slow_transfer_that_moves_is_never_cut(tmp_path: Path) -> None:
    class Slow(Noting):
        async def chunks(self, request: Any, context: Any) -> AsyncIterator[peer_pb2.Chunk]:
            async for each in super().chunks(request, context):
                yield each
                await asyncio.sleep(0.03)  # the pace of the sender, not a wait of the test

    path = tmp_path / "1.safetensors"
    async with serving(tmp_path, Slow) as remote, linked(remote.port, Waits(no_progress=1.2)) as link:
        await link.snapshot(manifest_of(0), path, INTAKE)
        assert arrived(path)
        assert remote.servicer.offsets == [0]


@in_loop
async def test_a_call_that_cannot_be_read_does_not_end_the_service(tmp_path: Path) -> None:
    async with serving(tmp_path) as remote, stub_of(remote.port) as stub:
        watching = asyncio.ensure_future(remote.server.watch())
        for _ in range(2):
            async with grpc.aio.insecure_channel(f"127.0.0.1:{remote.port}") as channel:
                with pytest.raises(grpc.aio.AioRpcError):
                    await channel.unary_unary(b"/crad.v1.\xb1eer/Hello")(b"", timeout=5)
            assert (
                await stub.Hello(peer_pb2.HelloRequest(nonce=bytes(NONCE_BYTES)), timeout=5, wait_for_ready=True)
            ).peer == PEER
        assert not watching.done()
        watching.cancel()


@in_loop
async def test_answers_that_are_no_messages_are_asked_for_again(tmp_path: Path) -> None:
    def garbling(handler: grpc.RpcMethodHandler) -> grpc.RpcMethodHandler:
        """The first message of each method is none."""
        seen: list[None] = []

        def serialize(message: Any) -> bytes:
            seen.append(None)
            return b"\xff\xff" if len(seen) == 1 else message.SerializeToString()

        return handler._replace(response_serializer=serialize)

    class Garbling(grpc.aio.ServerInterceptor):
        def __init__(self) -> None:
            self.handlers: dict[str, Any] = {}

        async def intercept_service(self, continuation: Any, details: Any) -> Any:
            name = details.method
            if name not in self.handlers:
                self.handlers[name] = garbling(await continuation(details))
            return self.handlers[name]

    remote = Remote(tmp_path / "remote")
    await remote.publish(0)
    server = grpc.aio.server(interceptors=[garbler := Garbling()])
    server.add_generic_rpc_handlers((remote.gate(),))
    assert server.add_insecure_port(f"127.0.0.1:{remote.port}") == remote.port
    await server.start()
    witness = Witness()
    link = witness.link(remote.port)
    watching = asyncio.create_task(link.watch())
    try:
        await witness.state_with(lambda state: state.round == 0)
        await link.snapshot(await link.manifest(0, INTAKE), tmp_path / "1.safetensors", INTAKE)
    finally:
        await stopped(watching)
        await link.close()
        await server.stop(grace=0)
        remote.close()
    assert (tmp_path / "1.safetensors").read_bytes() == SNAPSHOT
    assert len(garbler.handlers) == 4


@in_loop
async def test_a_damaged_manifest_is_refused_and_asked_for_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class DamagedAtFirst(Noting):
        calls = 0

        async def GetManifest(self, request: Any, context: Any) -> peer_pb2.GetManifestReply:
            self.calls += 1
            reply = await super().GetManifest(request, context)
            if self.calls == 1:
                reply.document = reply.document.replace(b'"predicted":[1,1]', b'"predicted":[1,9]')
            return reply

    async with serving(tmp_path, DamagedAtFirst) as remote, linked(remote.port) as link:
        assert await link.manifest(0, INTAKE) == manifest_of(0)
        assert remote.servicer.calls == 2
    assert "manifest of round 0 of peer 1 refused: manifest has sha256" in caplog.text


@pytest.mark.parametrize("damaged", ["Hello", "GetManifest"])
@in_loop
async def test_one_answer_that_would_end_the_run_is_asked_for_again(tmp_path: Path, damaged: str) -> None:
    """What was asked, or the answer, may have been damaged on the way."""

    class WrongAtFirst(Noting):
        hellos = manifests = 0

        async def Hello(self, request: Any, context: Any) -> peer_pb2.HelloReply:
            self.hellos += 1
            reply = await super().Hello(request, context)
            if damaged == "Hello" and self.hellos == 1:
                reply.agreed = reply.agreed.replace(b"3.0", b"3.1", 1)
            return reply

        async def GetManifest(self, request: Any, context: Any) -> peer_pb2.GetManifestReply:
            self.manifests += 1
            if damaged == "GetManifest" and self.manifests == 1:
                request.peer = 65
            return await super().GetManifest(request, context)

    witness = Witness()
    async with serving(tmp_path, WrongAtFirst) as remote:
        link = witness.link(remote.port)
        watching = asyncio.create_task(link.watch())
        await witness.connection(True)
        assert await link.manifest(0, INTAKE) == manifest_of(0)
        await stopped(watching)
        await link.close()
        assert (remote.servicer.hellos, remote.servicer.manifests) == ((2, 1) if damaged == "Hello" else (1, 2))


# --- what is not there ------------------------------------------------------------------------------------------------


@in_loop
async def test_a_round_that_is_gone_ends_the_run(tmp_path: Path) -> None:
    async with serving(tmp_path, rounds=3) as remote, linked(remote.port) as link:
        prune(remote.store, [2, 1], received_from=2)
        expected = r"round 0 is needed here of peer 1, but it answers: not found \(peer 1 does not keep round 0"
        with pytest.raises(IncompleteError, match=expected):
            await link.manifest(0, INTAKE)
        with pytest.raises(IncompleteError, match=expected):
            await link.snapshot(manifest_of(0), tmp_path / "1.safetensors", INTAKE)
        assert await link.manifest(1, INTAKE) == manifest_of(1)


@in_loop
async def test_a_snapshot_of_another_digest_ends_the_run(tmp_path: Path) -> None:
    async with serving(tmp_path) as remote, linked(remote.port) as link:
        other = manifest_of(0).model_copy(update={"sha256": "0" * 64})
        with pytest.raises(IncompleteError, match=f"round 0 of peer 1 has sha256 {manifest_of(0).sha256}, not 000"):
            await link.snapshot(other, tmp_path / "1.safetensors", INTAKE)


@in_loop
async def test_the_server_tells_apart_why_it_does_not_answer(tmp_path: Path) -> None:
    digest = manifest_of(0).sha256

    async with serving(tmp_path) as remote, stub_of(remote.port) as stub:

        async def code_of(offset: int = 0, **changes: Any) -> grpc.StatusCode:
            fields = {"peer": PEER, "round": 0, "sha256": digest, "offset": offset, **changes}
            call = stub.GetSnapshot(peer_pb2.GetSnapshotRequest(**fields), timeout=5)
            with suppress(grpc.aio.AioRpcError):
                while (await call.read()) is not grpc.aio.EOF:
                    pass
            return await call.code()

        assert await code_of() == grpc.StatusCode.OK
        assert await code_of(SIZE) == grpc.StatusCode.OK
        assert await code_of(SIZE + 1) == grpc.StatusCode.OUT_OF_RANGE
        assert await code_of(round=1) == grpc.StatusCode.FAILED_PRECONDITION
        assert await code_of(peer=2) == grpc.StatusCode.NOT_FOUND
        assert await code_of(sha256="../../lock") == grpc.StatusCode.INVALID_ARGUMENT
        assert await code_of(sha256="ab" * 32) == grpc.StatusCode.NOT_FOUND
        with pytest.raises(grpc.aio.AioRpcError, match="peer 1 does not keep round 0 of peer 2"):
            await stub.GetManifest(peer_pb2.GetManifestRequest(peer=2, round=0), timeout=5)


@in_loop
async def test_a_stream_goes_on_though_its_round_is_deleted_meanwhile(tmp_path: Path) -> None:
    class DeletesMeanwhile(Noting):
        async def chunks(self, request: Any, context: Any) -> AsyncIterator[peer_pb2.Chunk]:
            async for each in super().chunks(request, context):
                yield each
                if each.offset == 0:
                    prune(self._store, [], received_from=0)

    path = tmp_path / "1.safetensors"
    async with serving(tmp_path, DeletesMeanwhile) as remote, linked(remote.port) as link:
        await link.snapshot(manifest_of(0), path, INTAKE)
        assert arrived(path)


# --- addresses --------------------------------------------------------------------------------------------------------


@in_loop
async def test_a_port_in_use_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path) as remote:
        with pytest.raises(PortTakenError, match=rf"cannot listen on 127\.0\.0\.1:{remote.port}: the port is taken"):
            await start_server(f"127.0.0.1:{remote.port}", remote.servicer)
        with pytest.raises(PortTakenError, match="--listen"):
            await start_server(f"localhost:{remote.port}", remote.servicer)
        with socket.create_server(("127.0.0.1", 0)) as other:
            port = other.getsockname()[1]
            with pytest.raises(PortTakenError, match=f"cannot listen on 127.0.0.1:{port}:"):
                await start_server(f"127.0.0.1:{port}", remote.servicer)
        with pytest.raises(PortTakenError, match="not of this machine"):
            await start_server(f"192.0.2.1:{free_port()}", remote.servicer)


@pytest.mark.parametrize("variable", ["http_proxy", "https_proxy", "grpc_proxy", "all_proxy", "HTTPS_PROXY"])
@in_loop
async def test_proxies_of_the_environment_do_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    for name in ("no_proxy", "no_grpc_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, f"http://127.0.0.1:{free_port()}")  # nobody listens there

    async with serving(tmp_path) as remote, linked(remote.port, Waits(connect=5.0)) as link:
        async with asyncio.timeout(5):
            assert await link.manifest(0, INTAKE) == manifest_of(0)


@in_loop
async def test_every_channel_has_a_connection_of_its_own(tmp_path: Path) -> None:
    async with (
        serving(tmp_path) as remote,
        Proxy(f"127.0.0.1:{remote.port}") as proxy,
        stub_of(proxy.port) as one,
        stub_of(proxy.port) as other,
    ):
        for stub in (one, other, one, other):
            assert (await stub.Hello(peer_pb2.HelloRequest(nonce=bytes(NONCE_BYTES)), timeout=5)).peer == PEER
        assert proxy.accepted == 2


# --- many peers -------------------------------------------------------------------------------------------------------


@in_loop
async def test_of_many_peers_a_few_are_greeted_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer.link, "_SLOW_GREETING", 3600.0)

    class Deliberate(Noting):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.under_way = self.most = 0
            self.may_answer = asyncio.Event()

        async def Hello(self, request: Any, context: Any) -> peer_pb2.HelloReply:
            self.under_way += 1
            self.most = max(self.most, self.under_way)
            await self.may_answer.wait()
            self.under_way -= 1
            return await super().Hello(request, context)

    async with serving(tmp_path, Deliberate) as remote, linked(remote.port) as other:
        greetings = greeting_slots(100)
        links = [Link(federation(remote.port), ME, PEER, WAITS, greetings=greetings) for _ in range(6)]
        tasks = [asyncio.create_task(link.hello()) for link in links]
        try:
            await until(lambda: remote.servicer.under_way >= 2)
            await other.manifest(0, INTAKE)  # a connection and an answer later
            assert remote.servicer.most == 2
            remote.servicer.may_answer.set()
            await asyncio.wait_for(asyncio.gather(*tasks), 10)
            assert remote.servicer.most == 2
        finally:
            for task, link in zip(tasks, links, strict=True):
                await stopped(task)
                await link.close()


@in_loop
async def test_who_calls_is_called_back_however_long_the_pause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer.attempts, "_FIRST", 3600.0)
    monkeypatch.setattr(peer.link, "between_tries", lambda _: 3600.0)
    witness = Witness()
    async with serving(tmp_path) as remote:
        await remote.stop()
        link = witness.link(remote.port)
        task = asyncio.create_task(link.watch())
        try:
            await witness.connection(up=False)
            remote.configure()
            await remote.start()
            link.call_back()
            await witness.connection(up=True)
        finally:
            await stopped(task)
            await link.close()


@in_loop
async def test_the_service_is_told_who_begins_to_watch(tmp_path: Path) -> None:
    async with serving(tmp_path) as remote, stub_of(remote.port) as stub:
        called: list[int] = []
        remote.servicer._on_follow = called.append
        await stub.Hello(peer_pb2.HelloRequest(peer=ME, nonce=bytes(NONCE_BYTES)), timeout=5)
        watching = stub.Watch(peer_pb2.WatchRequest())
        await watching.read()
        watching.cancel()
        assert called == [ME]


def test_with_many_peers_each_is_looked_after_less_often_and_still_before_it_is_given_up() -> None:
    few, many = (dict(client_options(members)) for members in (10, 10_000))
    assert few["grpc.keepalive_time_ms"] == 3_000
    assert between_tries(10) == 0.8
    assert between_tries(100) > 20
    assert Status(10)._heartbeat == 10.0
    patience = Waits().no_progress
    assert (many["grpc.keepalive_time_ms"] + many["grpc.http2.ping_timeout_ms"]) / 1000 < patience
    assert Status(10_000)._heartbeat < patience
    assert between_tries(10_000) <= patience


@in_loop
async def test_nobody_is_called_between_two_tries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer.attempts, "_FIRST", 3600.0)
    monkeypatch.setattr(peer.link, "between_tries", lambda _: 3600.0)
    witness = Witness()
    async with serving(tmp_path) as remote, Proxy(f"127.0.0.1:{remote.port}") as proxy:
        await remote.stop()
        link = witness.link(proxy.port)
        task = asyncio.create_task(link.watch())
        try:
            await witness.connection(up=False)
            seen = proxy.accepted
            await asyncio.sleep(1.5)  # gRPC would try again after 0.2, and then after each second
            assert proxy.accepted == seen
        finally:
            await stopped(task)
            await link.close()
