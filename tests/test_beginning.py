"""Of a local mesh's peers a few begin at a time."""

from __future__ import annotations

import asyncio
import io
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from processes import Peers, doctored, up_command
from rich.console import Console
from wire import in_loop, stopped

import launch.mesh
from crad_p2p.federation import build_federation
from launch.computing import Computing
from launch.mesh import Mesh
from launch.view import Progress

COUNT, AT_ONCE = 5, 2
#: ``crad-mesh`` that begins one peer after the other, and gives none up that does not begin.
ONE_BY_ONE = doctored(
    "import launch.mesh as mesh, launch.cli; mesh.cores = lambda: 1; mesh._BEGINNING = 1; "
    "mesh._LONGEST_BEGINNING = 3600.0; launch.cli.main()"
)


def mesh_in(tmp_path: Path) -> Mesh:
    peers = [{"id": i, "address": f"127.0.0.1:{i + 1}"} for i in range(COUNT)]
    federation = build_federation({"federation": "beginning", "peers": peers}, "test")
    return Mesh(
        federation,
        tmp_path / "peers.yaml",
        tmp_path,
        computing=Computing(1, "cpu", "auto", tmp_path),
        recover=False,
        progress=Progress(Console(file=io.StringIO()), federation),
    )


@in_loop
async def test_a_peer_begins_when_another_has_begun_or_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    does_nothing = tmp_path / "does-nothing"
    does_nothing.write_text("#!/bin/sh\nexec sleep 60\n")
    does_nothing.chmod(0o700)
    monkeypatch.setattr(launch.mesh, "sys", SimpleNamespace(executable=str(does_nothing)))
    monkeypatch.setattr(launch.mesh, "cores", lambda: 1)
    monkeypatch.setattr(launch.mesh, "_BEGINNING", AT_ONCE)
    mesh = mesh_in(tmp_path)

    async def started(count: int) -> None:
        async with asyncio.timeout(10):
            while len(mesh._processes) < count:
                await asyncio.sleep(0.01)
        with suppress(TimeoutError):  # for one too many to show itself
            async with asyncio.timeout(0.1):
                await mesh._is_started[count].wait()
        assert sorted(mesh._processes) == list(range(count))

    tasks = [asyncio.create_task(mesh._run_once(peer, [])) for peer in range(COUNT)]
    try:
        await started(AT_ONCE)
        mesh._has_begun[0].set()
        await started(AT_ONCE + 1)
        mesh._processes[1].kill()
        await started(AT_ONCE + 2)
        assert await tasks[1] == -signal.SIGKILL
        assert not tasks[0].done()
    finally:
        for task in tasks:
            await stopped(task)
        for process in mesh._processes.values():
            if process.returncode is None:
                process.kill()
                await process.wait()


def test_a_peer_has_begun_when_its_data_are_loaded_though_it_waits_for_the_others(mesh: Callable[..., Peers]) -> None:
    peers = mesh(3, rounds=1)
    command = up_command(peers)
    ended = subprocess.run(
        **{**command, "args": [*ONE_BY_ONE, *command["args"][4:]]}, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
