"""Bad links between real peers: cut, slow, broken and lying. What is noticed, how soon, and what arrives in the end.

Everything that waits for time-outs runs at the same time, so that the waits do not add up.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Peer, federation_file, free_port
from wire import (
    INTAKE,
    LAYOUT,
    SIZE,
    SNAPSHOT,
    Remote,
    Witness,
    in_loop,
    manifest_of,
    serving,
    stopped,
    until,
)

import peer.status
from crad_p2p.data.datasets import load_dataset
from crad_p2p.device import resolve_precision
from crad_p2p.errors import ExitCode
from crad_p2p.federation import load_federation
from crad_p2p.simulation import simulate
from launch.proxy import Proxy
from peer import witness
from peer._proto.crad.v1 import peer_pb2
from peer.channels import Waits, client_options
from peer.chunks import LEAST_BYTES
from peer.exchange import Exchange
from peer.intake import Intake, document_digest
from peer.link import Link
from peer.status import Status
from peer.store import Store

CPU = torch.device("cpu")

#: Seconds until a silent cut is noticed, as configured, and at most, on a machine that has other work too.
_OPTIONS = dict(client_options(2))
NOTICED = (_OPTIONS["grpc.keepalive_time_ms"] + _OPTIONS["grpc.http2.ping_timeout_ms"]) / 1000
NOTICED_AT_MOST = 15.0
#: Seconds after healing until traffic resumes: promised, and what a busy machine may add.
RESUMED, BUSY = 5.0, 1.0


@pytest.fixture(autouse=True)
def _log_everything(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def minutes(number: float) -> Callable[..., Any]:
    return functools.partial(in_loop, seconds=60 * number)


@dataclass
class Connected:
    """A peer, the bad link to it, and what this side sees."""

    remote: Remote
    proxy: Proxy
    link: Link
    witness: Witness
    watching: asyncio.Task[None]
    path: Path

    def fetch(self) -> asyncio.Task[None]:
        return asyncio.create_task(self.link.snapshot(manifest_of(0), self.path, INTAKE))

    @property
    def offsets(self) -> list[int]:
        return self.remote.servicer.offsets

    def arrived(self) -> bool:
        return not self.path.with_suffix(".partial").exists() and self.path.read_bytes() == SNAPSHOT


@contextlib.asynccontextmanager
async def connected(folder: Path, waits: Waits | None = None, seed: int = 0) -> AsyncIterator[Connected]:
    folder.mkdir()
    witness = Witness()
    async with serving(folder) as remote, Proxy(f"127.0.0.1:{remote.port}", seed=seed) as proxy:
        link = witness.link(proxy.port, waits or Waits())
        watching = asyncio.create_task(link.watch())
        try:
            await witness.connection(True)
            yield Connected(remote, proxy, link, witness, watching, folder / "1.safetensors")
            assert not watching.done()
        finally:
            await stopped(watching)
            await link.close()


async def since(start: float, event: Awaitable[Any]) -> float:
    await event
    return time.monotonic() - start


# --- cuts -------------------------------------------------------------------------------------------------------------


def black_hole(proxy: Proxy) -> None:
    proxy.cut()


def deaf(proxy: Proxy) -> None:
    """Half open: what the peer sends is lost."""
    proxy.down.swallows = True


def mute(proxy: Proxy) -> None:
    """Half open: what is sent to the peer is lost."""
    proxy.up.swallows = True


def broken(proxy: Proxy) -> None:
    proxy.refuse()
    proxy.reset()


async def cut_and_healed(folder: Path, fault: Callable[[Proxy], None], seconds: float) -> tuple[str, float, float]:
    """A link that is cut in the middle of a transfer: seconds until that is noticed, and from healing to new bytes."""
    name = f"{fault.__name__} for {seconds:g} s"
    async with connected(folder / name.replace(" ", "-")) as it:
        it.proxy.down.bandwidth = SIZE / 60
        fetching = it.fetch()
        await until(lambda: it.link.bytes_received > SIZE / 60)
        noticed, healed = await cut(it, fault, seconds)
        before = it.link.bytes_received
        resumed = await since(healed, until(lambda: it.link.bytes_received > before))
        await asyncio.wait_for(fetching, 20)
        assert it.arrived()
        assert it.link.bytes_received == SIZE, name  # nothing was written twice
        assert all(offset >= before for offset in it.offsets[1:]), name
        return name, await noticed, resumed


async def idle_cut_and_healed(folder: Path, fault: Callable[[Proxy], None], seconds: float) -> tuple[str, float, float]:
    """The same without a transfer: seconds from healing until the peer's state has come again."""
    name = f"{fault.__name__} for {seconds:g} s while idle"
    async with connected(folder / name.replace(" ", "-")) as it:
        await it.witness.state_with(lambda state: state.round == 0)
        noticed, healed = await cut(it, fault, seconds)
        it.remote.status.update(round=1)
        resumed = await since(healed, it.witness.state_with(lambda state: state.round == 1))
        return name, await noticed, resumed


async def cut(it: Connected, fault: Callable[[Proxy], None], seconds: float) -> tuple[asyncio.Task[float], float]:
    """Seconds until it is noticed, and when it was healed."""
    start = time.monotonic()
    fault(it.proxy)
    noticed = asyncio.create_task(since(start, it.witness.connection(False)))
    await asyncio.sleep(seconds)  # the length of the cut
    it.proxy.heal()
    return noticed, time.monotonic()


async def idle(folder: Path) -> None:
    """A link that nobody cuts, and on which nothing is said but pings and the peer's heartbeat."""
    async with connected(folder) as it:
        await it.witness.state_with(lambda _: True)
        before = it.proxy.up.received
        await asyncio.sleep(14)  # several intervals of silence and a ping's wait
        assert it.proxy.up.received - before >= 3 * 17  # a ping has 17 bytes
        assert (it.proxy.accepted, it.proxy.present) == (1, 1)
        assert it.witness.connections.empty()


@minutes(2)
async def test_a_cut_is_noticed_and_traffic_resumes_after_healing_and_an_idle_link_lives_on(tmp_path: Path) -> None:
    cuts = [
        *((black_hole, seconds) for seconds in (3.0, 6.0, 9.0, 11.0, 14.0)),
        *((deaf, seconds) for seconds in (4.0, 10.0, 13.0)),
        *((broken, seconds) for seconds in (0.0, 1.0, 5.0, 15.5)),
    ]
    # Idle, a link is quiet for up to three seconds before its next ping goes out, and may have lost nothing till then.
    idle_cuts = [(fault, seconds) for fault in (black_hole, deaf, mute) for seconds in (8.0, 12.0)]
    *found, _ = await asyncio.gather(
        *(cut_and_healed(tmp_path, *each) for each in cuts),
        *(idle_cut_and_healed(tmp_path, *each) for each in idle_cuts),
        idle(tmp_path / "idle"),
    )
    for name, noticed, resumed in found:
        print(f"{name}: noticed after {noticed:.1f} s, resumed {resumed:.2f} s after healing")
    for name, noticed, resumed in found:
        assert noticed < (2.0 if name.startswith("broken") else NOTICED_AT_MOST), name
        assert resumed < RESUMED + BUSY, name


@in_loop
async def test_a_transfer_cut_at_90_percent_continues_there(tmp_path: Path) -> None:
    await asyncio.gather(*(cut_at_90_percent(tmp_path / fault.__name__, fault) for fault in (black_hole, broken)))


async def cut_at_90_percent(folder: Path, fault: Callable[[Proxy], None]) -> None:
    async with connected(folder) as it:
        it.proxy.down.bandwidth = SIZE / 2
        fetching = it.fetch()
        await until(lambda: it.link.bytes_received >= 0.9 * SIZE)
        fault(it.proxy)
        await it.witness.connection(False)
        there = it.path.with_suffix(".partial").stat().st_size
        assert 0.9 * SIZE <= there < 0.97 * SIZE
        it.proxy.heal()
        await asyncio.wait_for(fetching, 10)
        assert it.arrived()
        assert it.offsets == [0, there]
        assert it.link.bytes_received == SIZE
        assert SIZE <= it.proxy.down.passed < 1.05 * SIZE


# --- slow links -------------------------------------------------------------------------------------------------------


@in_loop
async def test_a_transfer_that_moves_on_a_very_slow_link_is_never_cut(tmp_path: Path) -> None:
    """At 20 kB/s a chunk takes over three seconds, and what is under way many times the wait for a ping's answer."""
    await asyncio.gather(slow(tmp_path / "slow", was_fast=False), slow(tmp_path / "fast before", was_fast=True))


async def slow(folder: Path, *, was_fast: bool) -> None:
    waits = Waits(no_progress=5.0)  # shorter than the peer's heartbeat: only the transfer shows that it is alive
    async with connected(folder, waits) as it:
        if was_fast:  # windows and buffers are as large as they get
            for _ in range(10):
                await it.fetch()
                it.path.unlink()
            it.offsets.clear()
        it.proxy.down.bandwidth = 20_000
        fetching = it.fetch()
        accepted = it.proxy.accepted
        await asyncio.sleep(16)  # longer than any wait that might cut it
        assert not fetching.done()
        it.proxy.down.bandwidth = None
        await fetching
        assert it.arrived()
        assert it.offsets == [0]
        assert it.proxy.accepted == accepted
        assert it.witness.connections.empty()  # it never counted as down


# --- links that lie ---------------------------------------------------------------------------------------------------


async def spoiled(folder: Path, rate: float, up: float) -> tuple[int, int]:
    """A snapshot over a link that flips bits for a while: flips, and how often it was asked for."""
    seed = 1024
    async with connected(folder / f"{rate:g}-{up:g}", Waits(connect=2.0, no_progress=2.0), seed=seed) as it:
        it.proxy.down.bandwidth = SIZE / 2
        it.proxy.down.flips, it.proxy.up.flips = rate, up
        fetching = it.fetch()
        asking = asyncio.create_task(it.link.manifest(0, INTAKE))
        end = time.monotonic() + 8
        while time.monotonic() < end and not fetching.done():
            assert not it.path.exists() or it.path.read_bytes() == SNAPSHOT  # never anything else at the final path
            await asyncio.sleep(0.01)
        it.proxy.heal()
        await asyncio.wait_for(fetching, 30)
        assert await asyncio.wait_for(asking, 30) == manifest_of(0)
        assert it.arrived()
        it.remote.status.update(round=7)
        await it.witness.state_with(lambda state: state.round == 7)  # the watch has recovered too
        return it.proxy.down.flipped + it.proxy.up.flipped, len(it.offsets)


@minutes(1)
async def test_flipped_bits_are_never_taken_in_and_the_link_recovers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer.status, "_HEARTBEAT", 0.5)  # well within the short wait for progress
    rates = ((1e-7, 0.0), (1e-6, 0.0), (1e-5, 0.0), (1e-3, 0.0), (0.0, 1e-2), (1e-4, 1e-2))
    print("seed 1024")
    for each, (flipped, asked) in zip(
        rates, await asyncio.gather(*(spoiled(tmp_path, *each) for each in rates)), strict=True
    ):
        print(f"rate {each}: {flipped} flips, asked {asked} times")
        assert flipped > 0 or each == (1e-7, 0.0)
    assert "snapshot of round 0 of peer 1 refused: sha256 of the file is" in caplog.text


PROXY_VARIABLES = [
    name for lower in ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy") for name in (lower, lower.upper())
]


# --- real peers -------------------------------------------------------------------------------------------------------


@minutes(3)
async def test_real_peers_cut_off_in_mid_run_finish_with_the_bytes_of_an_undisturbed_run(
    tmp_path: Path, start: Callable[..., Peer]
) -> None:
    """Three peers, each reaching the others through links of its own; one is cut off from both others and back."""
    rounds, ids = 60, (0, 1, 2)
    listen = {i: f"127.0.0.1:{free_port()}" for i in ids}
    trap = f"http://127.0.0.1:{free_port()}"  # nobody listens there: who asked it would get nowhere
    proxies = {(i, j): Proxy(listen[j]) for i in ids for j in ids if i != j}
    async with contextlib.AsyncExitStack() as stack:
        for each in proxies.values():
            await stack.enter_async_context(each)
        peers = []
        for i in ids:
            address = {j: listen[i] if i == j else f"127.0.0.1:{proxies[i, j].port}" for j in ids}
            entries = [{"id": j, "address": address[j], "arch": "cnn6@0.125"} for j in ids]
            (folder := tmp_path / str(i)).mkdir()
            path = federation_file(
                folder, peers=entries, home=tmp_path, rounds=rounds, data={"dataset": "digits", "samples": 300}
            )
            command = ["--id", str(i), "--peers", str(path), "--listen", listen[i]]
            peers.append(start(*command, state=folder / "state", **dict.fromkeys(PROXY_VARIABLES, trap)))

        def all_reach(number: int) -> bool:
            assert all(each.process.poll() in (None, 0) for each in peers), [each.output for each in peers]
            return min(each.last_round() for each in peers) >= number

        await until(lambda: all_reach(3), 100)
        around = [link for pair, link in proxies.items() if 0 in pair]
        for link in around:
            link.cut()
        for i, other in ((0, 1), (0, 2), (1, 0), (2, 0)):
            await until(lambda: f"peer {other} at" in peers[i].output and "ping timeout" in peers[i].output)  # noqa: B023
        reached = max(each.last_round() for each in peers)
        assert reached < rounds - 5, "the run was over before the cut was"
        for link in around:
            link.heal()
        healed = time.monotonic()
        await until(lambda: all_reach(reached + 1), 15)
        resumed = time.monotonic() - healed
        print(f"cut at about round {reached}; a round later {resumed:.1f} s after healing")
        assert resumed < RESUMED + BUSY
        await until(lambda: all(each.process.poll() is not None for each in peers), 100)
    assert [each.process.returncode for each in peers] == [ExitCode.COMPLETE] * 3, [each.output for each in peers]
    federation = load_federation(tmp_path / "0/peers.yaml")
    dataset = load_dataset(federation.data, seed=federation.seed, data_dir=tmp_path)
    _, expected = simulate(federation, dataset, device=CPU, precision=resolve_precision("auto", CPU), threads=1)
    for i, each in enumerate(peers):
        digests = [record.snapshot_sha256 for record in expected if record.peer == i]
        assert [record.snapshot_sha256 for record in each.history()] == digests
        assert len(digests) == rounds
        assert "Traceback" not in each.output


@in_loop
async def test_a_damaged_manifest_in_a_peers_state_is_not_used(tmp_path: Path) -> None:
    federation = load_federation(federation_file(tmp_path, peers=[peer_entry(i) for i in (0, 1)]))
    exchange = Exchange(
        federation,
        0,
        Store(tmp_path),
        Status(),
        witness.Witness({}),
        Waits(),
        tls=None,
        tell=lambda _: None,
        spawn=asyncio.create_task,
        may_lose=False,
    )
    exchange.use(Intake(federation, {"cnn6": LAYOUT}, classes=2), peer_pb2.Data())
    manifest = manifest_of(0).model_copy(update={"run": federation.digest()})
    document = manifest.to_bytes()
    state = peer_pb2.PeerState(round=0, manifest=document, manifest_sha256=document_digest(document))
    exchange._on_state(1, state)
    assert exchange._watched_manifest(1, 0) == manifest
    state.manifest = document.replace(b'"predicted":[1,1]', b'"predicted":[1,9]')
    assert exchange._watched_manifest(1, 0) is None
    await exchange.close()


def peer_entry(peer_id: int) -> dict[str, Any]:
    return {"id": peer_id, "address": f"127.0.0.1:{7400 + peer_id}", "arch": "cnn6"}


# --- network namespaces: an address for each peer, and the kernel's own TCP over a cut --------------------------------


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


class Switch:
    """A bridge on this host, and peers in namespaces of their own that are plugged into it and can be unplugged."""

    def __init__(self) -> None:
        self._tag = f"{os.getpid():x}"[-6:]
        self._bridge = f"cradbr{self._tag}"
        self._network = f"10.{200 + os.getpid() % 50}.{os.getpid() // 50 % 250}"
        self._namespaces: list[str] = []
        self._cables: list[str] = []

    def __enter__(self) -> Switch:
        try:
            _ip("link", "add", self._bridge, "type", "bridge")
            _ip("address", "add", f"{self._network}.1/24", "dev", self._bridge)
            _ip("link", "set", self._bridge, "up")
            _ip("netns", "add", f"crad{self._tag}x")
            self._namespaces.append(f"crad{self._tag}x")
        except (OSError, subprocess.CalledProcessError) as error:
            self.__exit__()
            pytest.skip(f"no network namespaces here: {getattr(error, 'stderr', '') or error}")
        return self

    def __exit__(self, *_: object) -> None:
        for name in self._namespaces:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)
        # A namespace lives on while a connection in it is closing, and its cable with it, unless that is removed.
        for device in (*self._cables, self._bridge):
            subprocess.run(["ip", "link", "delete", device], check=False, capture_output=True)

    def add(self, number: int) -> tuple[str, str]:
        """Namespace and address of a new peer."""
        name, near, inside = f"crad{self._tag}n{number}", self._cable(number), f"cradi{self._tag}{number}"
        _ip("netns", "add", name)
        self._namespaces.append(name)
        _ip("link", "add", near, "type", "veth", "peer", "name", inside)
        self._cables.append(near)
        _ip("link", "set", inside, "netns", name)
        _ip("-n", name, "address", "add", f"{self._network}.{number}/24", "dev", inside)
        for device in ("lo", inside):
            _ip("-n", name, "link", "set", device, "up")
        _ip("link", "set", near, "up")
        self.plug(number)
        return name, f"{self._network}.{number}"

    def plug(self, number: int) -> None:
        _ip("link", "set", self._cable(number), "master", self._bridge)

    def unplug(self, number: int) -> None:
        """Silently: both ends still have a carrier, and what they send is lost."""
        _ip("link", "set", self._cable(number), "nomaster")

    def _cable(self, number: int) -> str:
        return f"cradc{self._tag}{number}"


@contextlib.contextmanager
def served_in(namespace: str, host: str, folder: Path) -> Iterator[int]:
    """The port of a peer that runs in a namespace and sends ten chunks a second."""
    code = f"import asyncio, wire; asyncio.run(wire.serve_slowly({str(folder)!r}, {host!r}, 0.1))"
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        ["ip", "netns", "exec", namespace, sys.executable, "-c", code],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=None,
        env={**os.environ, "PYTHONPATH": path},
        text=True,
    )
    try:
        assert process.stdout is not None
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


async def unplugged_and_back(
    switch: Switch, number: int, seconds: float, folder: Path
) -> tuple[float, float | None, float]:
    """Length of a cut, seconds until it was noticed if it was, and from plugging in until traffic resumed."""
    namespace, host = switch.add(number)
    folder.mkdir()
    with served_in(namespace, host, folder / "remote") as port:
        witness = Witness()
        link = witness.link(port, Waits(), host=host)
        watching = asyncio.create_task(link.watch())
        path = folder / "1.safetensors"
        try:
            await witness.connection(True)
            fetching = asyncio.create_task(link.snapshot(manifest_of(0), path, INTAKE))
            await until(lambda: link.bytes_received > 4 * LEAST_BYTES)
            start = time.monotonic()
            switch.unplug(number)
            noticed = None
            noticing = asyncio.create_task(since(start, witness.connection(False)))
            await asyncio.sleep(seconds)
            if noticing.done():
                noticed = await noticing
            await stopped(noticing)
            before = link.bytes_received
            switch.plug(number)
            resumed = await since(time.monotonic(), until(lambda: link.bytes_received > before))
            await asyncio.wait_for(fetching, 40)
        finally:
            await stopped(watching)
            await link.close()
    assert path.read_bytes() == SNAPSHOT
    assert link.bytes_received == SIZE  # it went on at its offset
    return seconds, noticed, resumed


@pytest.mark.netns
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="network namespaces need root")
@pytest.mark.skipif(shutil.which("ip") is None, reason="network namespaces need the command ip")
@minutes(2)
async def test_cuts_between_network_namespaces(tmp_path: Path) -> None:
    with Switch() as switch:
        found = await asyncio.gather(
            *(
                unplugged_and_back(switch, number, seconds, tmp_path / str(number))
                for number, seconds in ((2, 2.0), (3, 9.0), (4, 14.0))
            )
        )
    for seconds, noticed, resumed in found:
        print(f"unplugged for {seconds:g} s: noticed after {noticed}, resumed {resumed:.2f} s after plugging in")
    for seconds, noticed, resumed in found:
        assert resumed < RESUMED + BUSY
        assert seconds < NOTICED or (noticed is not None and noticed < NOTICED_AT_MOST)
