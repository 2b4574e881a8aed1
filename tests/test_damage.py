"""A published snapshot that its owner cannot read, or that does not have its bytes any more."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from pathlib import Path

import grpc
import grpc.aio
import pytest
from wire import INTAKE, PEER, SNAPSHOT, in_loop, linked, manifest_of, serving, stopped, until

import peer.server
from crad_p2p.snapshot import SNAPSHOT_FILE, sha256_file
from peer._proto.crad.v1 import peer_pb2
from peer.intake import parse


@in_loop
async def test_a_file_that_cannot_be_read_is_told_without_its_path(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with serving(tmp_path) as remote, linked(remote.port) as link:
        file = remote.store.round_dir(0) / SNAPSHOT_FILE
        file.rename(tmp_path / "aside")
        file.mkdir()  # opens and does not read, as a file on a broken disk
        task = asyncio.create_task(link.snapshot(manifest_of(0), tmp_path / "1.safetensors", INTAKE))
        told = "snapshot of round 0 of peer 1 did not come: data loss (round 0 is damaged on the disk of peer 1)"
        try:
            await until(lambda: told in caplog.text)
            file.rmdir()
            (tmp_path / "aside").rename(file)
            await asyncio.wait_for(task, 20)
        finally:
            await stopped(task)
    assert "Traceback" not in caplog.text
    assert [record for record in caplog.records if record.exc_info] == []


@in_loop
async def test_too_many_open_files_are_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the file nothing is known then; its owner is not to be told that its disk fails."""
    told: list[tuple[int, str]] = []
    failing = True

    def hashed(path: Path) -> str:
        if failing:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), path)
        return sha256_file(path)

    monkeypatch.setattr(peer.server, "sha256_file", hashed)
    async with serving(tmp_path) as remote, linked(remote.port) as link:
        remote.servicer._on_damage = lambda *what: told.append(what)
        stub = link._line.stub
        request = {"peer": PEER, "round": 0, "sha256": manifest_of(0).sha256, "recheck": True}
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await stub.GetSnapshot(peer_pb2.GetSnapshotRequest(**request)).read()
        assert failed.value.code() == grpc.StatusCode.INTERNAL
        assert told == []
        failing = False
        raw = await stub.GetSnapshot(peer_pb2.GetSnapshotRequest(**request)).read()
        assert parse(peer_pb2.Chunk, raw).offset == 0
        file = remote.store.round_dir(0) / SNAPSHOT_FILE
        file.write_bytes(SNAPSHOT[:-1] + b"?")
        remote.servicer._found_whole.clear()
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await stub.GetSnapshot(peer_pb2.GetSnapshotRequest(**request)).read()
        assert failed.value.code() == grpc.StatusCode.DATA_LOSS
        assert told == [(0, "snapshot.safetensors does not have the digest that manifest.json says")]
