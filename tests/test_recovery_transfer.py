"""Fetching a lost round back from a peer that stops in the middle of it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from wire import INTAKE, SIZE, Remote, in_loop, linked, manifest_of, serving

from launch.proxy import Proxy
from peer.recovery import _while_it_moves


@in_loop
async def test_a_holder_that_disappears_is_given_up(tmp_path: Path) -> None:
    remote: Remote
    async with serving(tmp_path) as remote, Proxy(f"127.0.0.1:{remote.port}") as proxy, linked(proxy.port) as link:
        proxy.down.truncate = SIZE // 2
        transfer = asyncio.ensure_future(link.snapshot(manifest_of(0), tmp_path / "back.safetensors", INTAKE))
        while not link.bytes_received:
            await asyncio.sleep(0.01)
        proxy.cut()
        with pytest.raises(TimeoutError):
            await _while_it_moves(link, _the(transfer), 0.5)
        assert transfer.cancelled()


@in_loop
async def test_a_transfer_that_moves_is_waited_for(tmp_path: Path) -> None:
    async with serving(tmp_path) as remote, Proxy(f"127.0.0.1:{remote.port}") as proxy, linked(proxy.port) as link:
        proxy.down.bandwidth = SIZE / 2.0
        await _while_it_moves(link, link.snapshot(manifest_of(0), tmp_path / "back.safetensors", INTAKE), 0.7)
        assert (tmp_path / "back.safetensors").stat().st_size == SIZE


async def _the(transfer: asyncio.Future[None]) -> None:
    await transfer
