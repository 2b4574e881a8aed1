"""A large snapshot between two services on this machine: does memory stay small, and is it taken up where it was cut?

    python benchmarks/transfer.py                      # 2.3 GB: beyond every 32-bit size, some seconds
    python benchmarks/transfer.py --gigabytes 0.5
    python benchmarks/transfer.py --insecure           # plain text, to see what TLS costs

The serving process is killed in the middle and started again. Printed are the speed, the CPU seconds of both sides for
a GB, and their peak memory; with 1 ends who holds more than a small part of the file in memory, or begins anew.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from pathlib import Path

from crad_p2p.federation import Federation, build_federation
from crad_p2p.manifest import ClassStatistics, Manifest
from crad_p2p.memory import peak_rss_bytes
from crad_p2p.results import RoundRecord
from crad_p2p.snapshot import CHECKPOINT_FILE, SNAPSHOT_FILE, Layout, TensorSpec, sha256_file
from launch.authority import throwaway
from launch.quick import free_addresses
from peer import heap
from peer.channels import Waits
from peer.intake import Intake
from peer.link import Link
from peer.server import PeerServicer, start_server
from peer.status import Status
from peer.store import Store
from peer.tls import Tls

#: Peak memory that either side may have, whatever the size of the file.
ALLOWED_MB = 150
#: Seconds until the restarted server may be found again.
PATIENCE = 60.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.3)
    parser.add_argument("--insecure", action="store_true")
    arguments = parser.parse_args()
    floats = int(arguments.gigabytes * 1e9) // 4
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(measure(Path(folder), floats, insecure=arguments.insecure))


async def measure(folder: Path, floats: int, *, insecure: bool) -> int:
    federation = federation_of_two()
    manifest = publish(folder / "remote", federation, floats)
    throwaway(folder / "tls", federation.federation, federation.ids)
    keys = [None if insecure else folder / "tls" / str(i) for i in federation.ids]
    goal = folder / "received.safetensors"
    served = [Served(folder / "remote", federation, keys[1])]
    async with receiving(federation, floats, keys[0]) as (link, intake):
        start, cpu = time.monotonic(), time.process_time()
        fetch = asyncio.create_task(link.snapshot(manifest, goal, intake))
        while link.bytes_received < manifest.size // 2:
            await asyncio.sleep(0.01)
            if fetch.done():
                fetch.result()
        served[0].kill()
        served.append(Served(folder / "remote", federation, keys[1]))
        await asyncio.wait_for(fetch, PATIENCE + manifest.size / 20e6)
        seconds, cpu = time.monotonic() - start, time.process_time() - cpu
        received = link.bytes_received
    serving_cpu, serving_peak = served[1].ended()
    gigabytes, here = manifest.size / 1e9, peak_rss_bytes() / 1e6
    print(
        f"{gigabytes:.2f} GB in {seconds:.1f} s with a restart in the middle, checked: {gigabytes / seconds:.2f} GB/s"
    )
    print(f"CPU s/GB: receiving and checking {cpu / gigabytes:.2f}, serving {serving_cpu / (gigabytes / 2):.2f}")
    print(f"peak memory: receiving {here:.0f} MB, serving {serving_peak:.0f} MB, allowed {ALLOWED_MB} MB")
    print(f"bytes sent twice: {received - manifest.size}")
    return 1 if max(here, serving_peak) > ALLOWED_MB or received != manifest.size else 0


def federation_of_two() -> Federation:
    """Peers 0, who receives, and 1, who sends, on this machine."""
    peers = [{"id": i, "address": address, "arch": "cnn6"} for i, address in enumerate(free_addresses(2))]
    return build_federation({"federation": "transfer", "peers": peers}, "the benchmark")


@asynccontextmanager
async def receiving(federation: Federation, floats: int, keys: Path | None) -> AsyncIterator[tuple[Link, Intake]]:
    """Peer 0's link to peer 1, and its checks of snapshots of so many floats."""
    heap.tune()
    heap.settle()
    layout: Layout = {"weights": TensorSpec("F32", (floats,))}
    link = Link(federation, 0, 1, Waits(), tls=keys and Tls(keys, federation.federation, 0))
    try:
        yield link, Intake(federation, {"cnn6": layout}, classes=1)
    finally:
        await link.close()


def publish(root: Path, federation: Federation, floats: int) -> Manifest:
    """Round 0 of peer 1: a snapshot whose weights are zeros, so that the file takes no room on the disk."""
    store = Store(root)
    store.open(federation, 1)
    staging = store.staging_dir(0)
    header = b'{"weights":{"dtype":"F32","shape":[%d],"data_offsets":[0,%d]}}' % (floats, 4 * floats)
    with (staging / SNAPSHOT_FILE).open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 4 * floats)
    (staging / CHECKPOINT_FILE).touch()
    manifest = Manifest(
        run=federation.digest(),
        peer=1,
        round=0,
        arch="cnn6",
        size=(staging / SNAPSHOT_FILE).stat().st_size,
        sha256=sha256_file(staging / SNAPSHOT_FILE),
        statistics=ClassStatistics(counts=(1,), hits=(1,), predicted=(1,)),
        consumed=(),
        model_round=0,
        missing=(),
        quarantined=(),
    )
    store.commit(staging, manifest, RoundRecord(1, 0, manifest.sha256, None))
    store.close()
    return manifest


class Served:
    """The service of peer 1 in a process of its own."""

    def __init__(self, root: Path, federation: Federation, keys: Path | None) -> None:
        self._told, ours = multiprocessing.get_context("spawn").Pipe()
        self._process = multiprocessing.get_context("spawn").Process(target=serve, args=(root, federation, keys, ours))
        self._process.start()
        ours.close()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def ended(self) -> tuple[float, float]:
        """End it; the CPU seconds that it has taken, and its peak memory in MB."""
        self._told.send(None)
        self._told.recv()  # that it was ready
        cpu, peak = self._told.recv()
        self._process.join()
        return cpu, peak


def serve(root: Path, federation: Federation, keys: Path | None, told: Connection) -> None:
    asyncio.run(serve_until_told(root, federation, keys, told))


async def serve_until_told(root: Path, federation: Federation, keys: Path | None, told: Connection) -> None:
    heap.tune()
    heap.settle()
    store, status = Store(root), Status()
    store.open(federation, 1)
    manifest = store.manifest(0)
    status.update(round=0, manifest=manifest.to_bytes())
    tls = keys and Tls(keys, federation.federation, 1)
    server = await start_server(federation.peer(1).address, PeerServicer(federation, 1, store, status, tls=tls))
    before = time.process_time()
    told.send(None)
    await asyncio.to_thread(told.recv)
    told.send((time.process_time() - before, peak_rss_bytes() / 1e6))
    await server.stop(grace=0)
    store.close()


if __name__ == "__main__":
    raise SystemExit(main())
