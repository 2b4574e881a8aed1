"""Fetching a lost round back from a peer that stops in the middle of it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from wire import INTAKE, PEER, SIZE, Remote, in_loop, linked, manifest_of, serving

from crad_p2p.manifest import Manifest
from launch.proxy import Proxy
from peer import recovery
from peer.channels import Waits
from peer.chunks import LEAST_BYTES
from peer.link import Link
from peer.recovery import _SlowError, _while_it_moves
from peer.store import Store


@in_loop
async def test_a_holder_that_disappears_is_given_up(tmp_path: Path) -> None:
    remote: Remote
    async with serving(tmp_path) as remote, Proxy(f"127.0.0.1:{remote.port}") as proxy, linked(proxy.port) as link:
        proxy.down.truncate = SIZE // 2
        transfer = asyncio.ensure_future(link.snapshot(manifest_of(0), tmp_path / "back.safetensors", INTAKE))
        while not link.bytes_received:
            await asyncio.sleep(0.01)
        proxy.cut()
        with pytest.raises(_SlowError):
            await _while_it_moves(link, _the(transfer), 0.5, 1)
        assert transfer.cancelled()


@in_loop
async def test_a_transfer_that_moves_is_waited_for(tmp_path: Path) -> None:
    async with serving(tmp_path) as remote, Proxy(f"127.0.0.1:{remote.port}") as proxy, linked(proxy.port) as link:
        proxy.down.bandwidth = SIZE / 2.0
        await _while_it_moves(link, link.snapshot(manifest_of(0), tmp_path / "back.safetensors", INTAKE), 0.7, 1)
        assert (tmp_path / "back.safetensors").stat().st_size == SIZE


@pytest.mark.parametrize("has_other", [True, False])
def test_one_that_sends_a_little_now_and_then_is_left_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, has_other: bool
) -> None:
    """And asked again if there is none."""
    caplog.set_level("INFO")
    waits, store, taken = Waits(connect=5.0, no_progress=0.3), Store(tmp_path / "store"), []

    @in_loop
    async def fetch() -> None:
        remote: Remote
        other: Remote
        async with (
            serving(tmp_path / "a") as remote,
            serving(tmp_path / "b") as other,
            Proxy(f"127.0.0.1:{remote.port}") as proxy,
            linked(proxy.port) as slow,
            linked(other.port) as fast,
        ):
            proxy.down.bandwidth = LEAST_BYTES / 2

            async def take(link: Link, manifest: Manifest, *_: Any, least: int) -> None:
                proxy.down.bandwidth = None if least == 1 else LEAST_BYTES / 2
                await _while_it_moves(link, link.snapshot(manifest, tmp_path / "back", INTAKE), 0.3, least)
                taken.append(link)

            monkeypatch.setattr(recovery, "_take", take)
            holders = [slow, fast] if has_other else [slow]
            assert await recovery._fetch(holders, PEER, 0, None, store, INTAKE, waits)
            assert taken == holders[-1:]

    fetch()
    assert "bytes in 0.3 s, and another may be faster" in caplog.text


async def _the(transfer: asyncio.Future[None]) -> None:
    await transfer
