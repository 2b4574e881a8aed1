"""A peer with a right certificate that answers what it should not: the link stays small, and says what was wrong."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from wire import (
    INTAKE,
    ME,
    PEER,
    SNAPSHOT,
    Noting,
    Remote,
    federation,
    in_loop,
    linked,
    manifest_of,
    serving,
    stopped,
    until,
)

from crad_p2p.errors import ConfigurationError, IncompleteError, PeersDisagreeError
from crad_p2p.snapshot import SnapshotError
from launch.authority import throwaway
from peer import accepting
from peer._proto.crad.v1 import peer_pb2
from peer.accepting import make_server
from peer.channels import Waits
from peer.intake import LARGEST_CHUNK_BYTES, check_seen
from peer.link import Link
from peer.tls import Tls

IMPATIENT = Waits(connect=1.0, no_progress=1.0)

# --- states -----------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def watched(tmp_path: Path, kind: type[Noting]) -> AsyncIterator[list[peer_pb2.PeerState]]:
    """What the link takes of the states of such a peer."""
    taken: list[peer_pb2.PeerState] = []
    async with serving(tmp_path, kind) as remote:
        port = remote.port
        link = Link(federation(port), ME, PEER, IMPATIENT, on_state=lambda _, state: taken.append(state))
        watching = asyncio.ensure_future(link.watch())
        try:
            yield taken
        finally:
            await stopped(watching)
            await link.close()


class Talkative(Noting):
    """Large states without end, each another one."""

    async def Watch(self, *_: Any) -> AsyncIterator[peer_pb2.PeerState]:
        for number in range(10**9):
            yield peer_pb2.PeerState(round=number % 2, phase="train", manifest=number.to_bytes(4, "big") * 60_000)


@in_loop
async def test_states_without_end_are_taken_no_faster_than_is_good(tmp_path: Path) -> None:
    async with watched(tmp_path, Talkative) as taken:
        await until(lambda: bool(taken))
        before, cpu = len(taken), time.process_time()
        await asyncio.sleep(1.5)
        assert 5 < len(taken) - before < 40  # 240 kB each, 4 MB/s
        assert time.process_time() - cpu < 0.75  # and this process is both sides


ODD = {
    "busy_seconds nan": {"busy_seconds": float("nan")},
    "busy_seconds inf": {"busy_seconds": float("inf")},
    "busy_seconds -1": {"busy_seconds": -1.0},
    "round -2": {"round": -2},
    "phase dance": {"phase": "dance"},
    "explanation xxxx": {"explanation": "x" * 2_001},
    "manifest 262145 bytes": {"manifest": bytes(256 * 1024 + 1)},
    "manifest_sha256 ../../lock": {"manifest_sha256": "../../lock"},
    "data": {"data": peer_pb2.Data(class_names=["x"] * 10_001)},
}


@pytest.mark.parametrize("name", ODD)
def test_a_state_that_cannot_be_is_refused_in_a_line(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Odd(Noting):
        async def Watch(self, *_: Any) -> AsyncIterator[peer_pb2.PeerState]:
            yield peer_pb2.PeerState(**{"phase": "wait", **ODD[name]})
            await asyncio.sleep(60)

    @in_loop
    async def test() -> None:
        async with watched(tmp_path, Odd) as taken:
            await until(lambda: f"its answer cannot be used: PeerState with {name}" in caplog.text)
            assert not taken

    with caplog.at_level(logging.INFO):
        test()
    assert len(caplog.text) < 5_000


# --- chunks -----------------------------------------------------------------------------------------------------------


def chunks_of(kind: str) -> type[Noting]:
    class Sender(Noting):
        async def chunks(self, *_: Any) -> AsyncIterator[peer_pb2.Chunk]:
            at = 0
            if kind == "beyond the end":
                while True:
                    data = SNAPSHOT[at : at + LARGEST_CHUNK_BYTES] or bytes(LARGEST_CHUNK_BYTES)
                    yield peer_pb2.Chunk(offset=at, data=data)
                    at += len(data)
            elif kind == "tiny":
                for at in range(len(SNAPSHOT)):
                    yield peer_pb2.Chunk(offset=at, data=SNAPSHOT[at : at + 1])
            elif kind == "the same":
                while True:
                    yield peer_pb2.Chunk(offset=0, data=SNAPSHOT[:2_000])
            elif kind == "another header":
                while True:
                    yield peer_pb2.Chunk(offset=at, data=b"x" * 100_000)
                    at += 100_000

    return Sender


WRONG = {
    "beyond the end": "stream goes on beyond the",
    "tiny": "chunk of 1 bytes in the middle of the file",
    "the same": "chunk of 2000 bytes at 0, expected one at 2000",
    "another header": "stream goes on beyond the",  # without TLS only the whole file is judged
}


@pytest.mark.parametrize("kind", WRONG)
def test_chunks_that_make_no_file_are_given_up(tmp_path: Path, kind: str) -> None:
    @in_loop
    async def test() -> None:
        async with serving(tmp_path, chunks_of(kind)) as remote, linked(remote.port) as link:
            with pytest.raises(SnapshotError, match=WRONG[kind]):
                await link.snapshot(manifest_of(0), tmp_path / "1.safetensors", INTAKE, tries=2)
            assert link.bytes_received < 3 * len(SNAPSHOT)
            assert sum(path.stat().st_size for path in tmp_path.glob("1.*")) <= len(SNAPSHOT)

    test()


@pytest.mark.parametrize("empty", [True, False])
def test_a_transfer_without_progress_is_asked_for_again_in_a_line(
    tmp_path: Path, empty: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing at all, or chunks without a byte."""

    class Idle(Noting):
        async def chunks(self, *_: Any) -> AsyncIterator[peer_pb2.Chunk]:
            while True:
                await asyncio.sleep(0.01 if empty else 60)
                yield peer_pb2.Chunk()

    said = "refused: Chunk with data 0 bytes" if empty else "nothing came for 1 s"

    @in_loop
    async def test() -> None:
        async with serving(tmp_path, Idle) as remote, linked(remote.port, IMPATIENT) as link:
            fetching = asyncio.ensure_future(link.snapshot(manifest_of(0), tmp_path / "1.safetensors", INTAKE))
            await until(lambda: len(remote.servicer.offsets) > 1)
            await stopped(fetching)

    with caplog.at_level(logging.INFO):
        test()
    assert caplog.text.count(said) == 1


# --- what it has had --------------------------------------------------------------------------------------------------


@in_loop
async def test_one_of_another_run_is_told_so_and_not_that_it_proves_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    throwaway(tmp_path / "tls", "link-test", [ME, PEER])
    own, theirs = (Tls(tmp_path / "tls" / str(i), "link-test", i) for i in (ME, PEER))

    class Remembers(Noting):
        async def Hello(self, request: Any, call: Any) -> peer_pb2.HelloReply:
            reply = await super().Hello(request, call)
            reply.seen_round, reply.seen_sha256, reply.seen_manifest = 3, "0" * 64, manifest_of(3).to_bytes()
            return reply

    remote = Remote(tmp_path / "remote", Remembers)
    remote.servicer = Remembers(federation(remote.port, rounds=7), PEER, remote.store, remote.status, None, theirs)
    await remote.start()
    link = Link(federation(remote.port), ME, PEER, IMPATIENT, tls=own)
    try:
        with pytest.raises(PeersDisagreeError, match="rounds is 7 in the file of peer 1 and 300 in the file of peer 0"):
            await link.hello()
    finally:
        await link.close()
        await remote.stop()
        remote.close()
    assert "does not prove it" not in caplog.text


def test_a_manifest_of_another_run_proves_nothing() -> None:
    reply = peer_pb2.HelloReply(seen_round=3, seen_sha256="0" * 64, seen_manifest=manifest_of(3).to_bytes())
    with pytest.raises(ValueError, match="the manifest is of another run, with other settings"):
        check_seen(reply, federation(1, rounds=7), PEER, ())


# --- who it is --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["none", "another key", "replayed", "for another caller", "another certificate"])
def test_an_answer_without_proof_is_not_used(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Even at the other end of a connection whose certificate TLS has found right."""
    throwaway(tmp_path / "tls", "link-test", [ME, PEER, 2])
    own, theirs, third = (Tls(tmp_path / "tls" / str(i), "link-test", i) for i in (ME, PEER, 2))
    kept: list[bytes] = []

    class Liar(Noting):
        async def Hello(self, request: Any, call: Any) -> peer_pb2.HelloReply:
            if kind == "another key":
                self.tls = third
            elif kind == "for another caller":
                request.peer = 2
            reply = await super().Hello(request, call)
            if kind == "none":
                reply.proof = b""
            elif kind == "replayed":
                kept.append(reply.proof)
                reply.proof = kept[0]
            if kind == "another key":
                self.tls = theirs
                reply.certificate = (await super().Hello(request, call)).certificate
            elif kind == "another certificate":
                self.tls = third
                reply.certificate = (await super().Hello(request, call)).certificate
                self.tls = theirs
            return reply

    @in_loop
    async def test() -> None:
        remote = Remote(tmp_path / "remote", Liar)
        remote.servicer = Liar(federation(remote.port), PEER, remote.store, remote.status, None, theirs)
        await remote.publish(0)
        await remote.start()
        link = Link(federation(remote.port), ME, PEER, IMPATIENT, tls=own)
        try:
            if kind == "replayed":
                await link.hello()
            hello = asyncio.ensure_future(link.hello())
            await until(lambda: "it does not prove to be peer 1: " in caplog.text)
            assert not hello.done()
            await stopped(hello)  # type: ignore[arg-type]
        finally:
            await link.close()
            await remote.stop()
            remote.close()

    with caplog.at_level(logging.INFO):
        test()


# --- the server itself ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["AioServer", "AioServer._make_request_call_future"])
def test_a_grpcio_with_other_insides_is_not_used(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    """Its server would be there, and could be ended by any call with a damaged name."""

    class Insides:
        def __init__(self) -> None:
            if missing != "AioServer":
                self.AioServer = object

    monkeypatch.setattr(accepting, "cygrpc", Insides())
    expected = (
        rf"^grpcio \S+ is not known to crad-p2p .*{missing.rpartition('.')[2]}.*: install 'grpcio>=1.85,<1.86', or"
    )

    @in_loop
    async def start() -> None:
        with pytest.raises(ConfigurationError, match=expected):
            make_server((), "crad.v1.Peer", {}, lambda: None)

    start()


@in_loop
async def test_a_server_that_ends_by_itself_ends_its_peer(tmp_path: Path) -> None:
    async with serving(tmp_path) as remote:
        watching = asyncio.ensure_future(remote.server.watch())
        await asyncio.sleep(0)
        assert not watching.done()
        await remote.server.stop(grace=0)
        with pytest.raises(
            IncompleteError, match=r"^the gRPC server on 127\.0\.0\.1:\d+ has ended \(it was stopped\);"
        ):
            await watching
