"""How much memory a peer's service takes, and how much CPU time when nothing happens.

    python benchmarks/service_memory.py                                  # ten peers, snapshots of 45 MB
    python benchmarks/service_memory.py --peers 100 --megabytes 0        # a hundred, tiny models

One real ``crad-peer`` over mutual TLS, with a learner that does not learn (tests/light). All others are played by this
one process, with the project's own servers and links: each has a certificate, an address, and a connection of its own
in each direction, publishes as many rounds as the real one, and fetches all of that one's snapshots. To the real one's
service the mesh is as large as it says; only the machine is less busy than with as many processes.

Printed are the resident memory of that service (VmRSS and VmHWM of /proc/PID/status: what everybody calls so, files
that are mapped and shared with other processes included), the parts of it that are its own, and the CPU seconds that it
takes in a minute at rest. Ends with 1 if the peak is above --allowed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import yaml

from crad_p2p.federation import Federation, load_federation
from crad_p2p.manifest import ClassStatistics, Consumed, Manifest
from crad_p2p.results import RoundRecord
from crad_p2p.snapshot import CHECKPOINT_FILE, SNAPSHOT_FILE, TensorSpec, sha256_file
from launch.authority import throwaway
from launch.quick import free_addresses
from peer._proto.crad.v1 import peer_pb2
from peer.channels import Waits
from peer.intake import Intake
from peer.link import Link
from peer.publishing import Publisher
from peer.server import PeerServicer, start_server
from peer.status import Status
from peer.store import Store
from peer.tls import Tls

LIGHT = Path(__file__).parents[1] / "tests" / "light"
#: As the light learner says it.
ARCH, CLASSES = "cnn6@0.125", ("even", "odd")
DATA = peer_pb2.Data(class_names=CLASSES, image_shape=[1, 8, 8], partition_digest="ab" * 32)
#: Seconds in which the real one must have made its rounds.
PATIENCE = 600.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=10)
    parser.add_argument("--megabytes", type=float, default=45.0, help="of a snapshot")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--rest", type=float, default=20.0, help="seconds of rest at the end")
    parser.add_argument("--allowed", type=float, help="megabytes (of 1024 * 1024 bytes) that the peak may have")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(
            measure(
                Path(folder), arguments.peers, int(arguments.megabytes * 1e6) // 4, arguments.rounds, arguments.rest
            )
        )
    print(f"{arguments.peers} peers, snapshots of {arguments.megabytes:g} MB, {arguments.rounds} rounds")
    for name, value in found.items():
        print(f"{name:32}{value:10.2f}")
    from report import write  # reads torch

    write(arguments.json, "service_memory", {"peers": arguments.peers, "megabytes": arguments.megabytes, **found})
    return 1 if arguments.allowed is not None and found["peak, MB"] > arguments.allowed else 0


async def measure(folder: Path, count: int, floats: int, rounds: int, rest: float) -> dict[str, float]:
    """Run it; what was found, by name. Megabytes are of 1024 * 1024 bytes, as in VmRSS."""
    floats = max(8, floats - floats % 8)
    file = folder / "peers.yaml"
    peers = [{"id": i, "address": address, "arch": ARCH} for i, address in enumerate(free_addresses(count))]
    tree = {"federation": "memory", "rounds": rounds + 1, "data": {"dataset": "digits", "samples": 100 * count}}
    file.write_text(yaml.safe_dump({**tree, "peers": peers}))
    federation = load_federation(file)
    throwaway(folder / "crad-tls", federation.federation, federation.ids)
    source = folder / "common.safetensors"
    header = b'{"weights":{"dtype":"F32","shape":[%d],"data_offsets":[0,%d]}}' % (floats, 4 * floats)
    source.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4 * floats))
    (folder / "hold").write_text(str(rounds + 1))  # for the light learner
    async with AsyncExitStack() as stack:
        others = [Other(folder, federation, peer, source, floats) for peer in federation.ids[1:]]
        for other in others:
            await other.start()
            stack.push_async_callback(other.stop)
        environment = {**os.environ, "LIGHT_CONTROL": str(folder), "LIGHT_FLOATS": str(floats)}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(LIGHT), os.environ.get("PYTHONPATH")]))
        command = [sys.executable, "-P", "-m", "peer", "--id", "0", "--peers", str(file), "--state-dir", "state-0"]
        process = subprocess.Popen(
            [*command, "--device", "cpu"], cwd=folder, env=environment, stdout=subprocess.DEVNULL
        )
        stack.callback(end, process)
        samples: list[float] = []
        deadline = time.monotonic() + PATIENCE
        while min(other.fetched for other in others) < rounds or not everything_is_here(folder, count, rounds):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"peer 0 has not made {rounds} rounds; it has ended with {process.poll()}")
            with suppress(OSError, KeyError):
                samples.append(status(process.pid)["VmRSS"])
            await asyncio.sleep(0.05)
        before = cpu_seconds(process.pid)
        await asyncio.sleep(rest)
        idle = cpu_seconds(process.pid) - before
        about, parts = status(process.pid), rollup(process.pid)
        return {
            "peak, MB": about["VmHWM"],
            "middle while it worked, MB": sorted(samples)[len(samples) // 2],
            "at rest, MB": about["VmRSS"],
            "  of that its own (private), MB": parts["Private_Clean"] + parts["Private_Dirty"],
            "  of that no file (anonymous), MB": parts["Anonymous"],
            "its share (Pss), MB": parts["Pss"],
            "threads": about["Threads"] * 1024,
            "CPU seconds a minute at rest": idle / rest * 60 if rest else 0.0,
        }


def everything_is_here(folder: Path, count: int, number: int) -> bool:
    return len(list(folder.glob(f"state-0/received/{number:06d}/*.safetensors"))) == count - 1


def end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait(30)


def status(pid: int) -> Mapping[str, float]:
    """Numbers of /proc/PID/status, kilobytes in megabytes."""
    return _numbers(Path("/proc", str(pid), "status"))


def rollup(pid: int) -> Mapping[str, float]:
    """Numbers of /proc/PID/smaps_rollup, in megabytes."""
    return _numbers(Path("/proc", str(pid), "smaps_rollup"))


def _numbers(path: Path) -> Mapping[str, float]:
    fields = (line.split() for line in path.read_text().splitlines())
    return {each[0].rstrip(":"): int(each[1]) / 1024 for each in fields if len(each) > 1 and each[1].isdigit()}


def cpu_seconds(pid: int) -> float:
    """That a process has taken so far, its children left out."""
    fields = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Other:
    """A peer in this process: it serves, follows peer 0, and publishes what that one does."""

    def __init__(self, folder: Path, federation: Federation, peer: int, source: Path, floats: int) -> None:
        self.fetched = -1
        self._folder, self._federation, self._id, self._source = folder, federation, peer, source
        self._tls = Tls(folder / "crad-tls" / str(peer), federation.federation, peer)
        self._store, self._status = Store(folder / f"state-{peer}"), Status()
        self._store.open(federation, peer)
        self._publisher = Publisher(self._store, self._status, self._tls)
        layouts = {ARCH: {"weights": TensorSpec("F32", (floats,))}}
        self._intake = Intake(federation, layouts, len(CLASSES), lambda: self._tls.authorities)
        self._digest = sha256_file(source)
        self._announced: asyncio.Queue[int] = asyncio.Queue()
        self._link = Link(federation, peer, 0, Waits(), on_state=self._on_state, tls=self._tls)

    async def start(self) -> None:
        self._status.show_data(DATA)
        servicer = PeerServicer(self._federation, self._id, self._store, self._status, tls=self._tls)
        self._server = await start_server(self._federation.peer(self._id).address, servicer)
        await self._publish(0, "")
        self._tasks = [asyncio.create_task(work) for work in (self._link.watch(), self._take())]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        await self._link.close()
        await self._server.stop(grace=0)

    def _on_state(self, _: int, state: peer_pb2.PeerState) -> None:
        self._announced.put_nowait(state.round)

    async def _take(self) -> None:
        while True:
            announced = await self._announced.get()
            for number in range(self.fetched + 1, announced + 1):
                manifest = await self._link.manifest(number, self._intake)
                goal = self._folder / f"{self._id}.safetensors"
                await self._link.snapshot(manifest, goal, self._intake)
                goal.unlink()
                self.fetched = number
                await self._publish(number + 1, manifest.sha256)

    async def _publish(self, number: int, digest: str) -> None:
        """A round that has learned from all others, of whom all but peer 0 have the same model."""
        staging = self._store.staging_dir(number)
        os.link(self._source, staging / SNAPSHOT_FILE)
        (staging / CHECKPOINT_FILE).touch()
        teachers = [peer for peer in self._federation.ids if peer != self._id] if number else []
        manifest = Manifest(
            run=self._federation.digest(),
            peer=self._id,
            round=number,
            arch=ARCH,
            size=self._source.stat().st_size,
            sha256=self._digest,
            statistics=ClassStatistics(counts=(1000, 0), hits=(1, 0), predicted=(1000, 0)),
            consumed=tuple(
                Consumed(peer=peer, round=number - 1, sha256=self._digest if peer else digest) for peer in teachers
            ),
            model_round=number,
            missing=(),
            quarantined=(),
        )
        await self._publisher.write(staging, manifest, RoundRecord(self._id, number, self._digest, None))
        self._publisher.show()
        known: dict[str, Any] = {"collected": number - 1, "phase": "wait"}
        self._status.update(**known)


if __name__ == "__main__":
    raise SystemExit(main())
