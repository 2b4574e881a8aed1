"""What does a snapshot cost on its way from peer to peer, compared with bare TLS sockets?

    python benchmarks/tls.py                           # five rounds of 0.45 GB each way: about a minute
    python benchmarks/tls.py --gigabytes 0.1 --repetitions 3 --json tls.json

Moved over loopback with mutual TLS 1.3, in turns and each end in a process of its own:

* by peers: published, fetched, written, hashed and checked, as in a run;
* by a peer's server and client, without what comes after: nothing is written or hashed;
* by sockets of Python's ``ssl`` module, which only move the bytes;
* by such sockets that also read them from a file, and write and hash them.

Printed are the CPU seconds of both ends together for a GB, which other work on the machine changes less than it does
the speed, and their ratios, each to the sockets of the same turn. Ends with 1 if one to sockets that do the same is
above --allowed.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import socket
import ssl
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc.aio
from transfer import federation_of_two, publish, receiving, serve

from crad_p2p.federation import Federation
from crad_p2p.manifest import Manifest
from crad_p2p.snapshot import SNAPSHOT_FILE, sha256_file
from launch.authority import throwaway
from peer._proto.crad.v1 import peer_pb2
from peer.channels import RawStub, dial
from peer.credentials import CA_FILE, CERTIFICATE_FILE, KEY_FILE
from peer.intake import parse_chunk
from peer.store import Store
from peer.tls import Tls

#: Bytes that the sockets are given, and asked for, at a time.
_PIECE = 1 << 18
_SPAWN = multiprocessing.get_context("spawn")

#: Told when the other end may begin, and asked for the CPU seconds at the end.
End = Callable[[Connection], None]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=0.45)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument(
        "--allowed", type=float, default=1.7, help="ratio to sockets that do the same; beyond it, end with 1"
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    from report import in_words, spread, write  # reads torch, which the processes at the ends need not

    with tempfile.TemporaryDirectory() as folder:
        found = compare(Path(folder), int(arguments.gigabytes * 1e9) // 4, arguments.repetitions)
    ratios = {
        f"{ours} to {theirs}": [a / b for a, b in zip(found[ours], found[theirs], strict=True)]
        for ours, theirs in (("peers", "sockets with files"), ("peers, bytes only", "sockets"), ("peers", "sockets"))
    }
    print(f"{arguments.repetitions} times {arguments.gigabytes:g} GB; median (least to greatest)")
    for name, values in found.items():
        print(f"{name:20} {in_words(values)} CPU s/GB, both ends")
    for name, values in ratios.items():
        print(f"{name}: {in_words(values)}")
    figures = {"cpu_seconds_per_gb": found, "ratio": ratios}
    write(
        arguments.json,
        "tls",
        {key: {name: spread(values) for name, values in each.items()} for key, each in figures.items()},
    )
    worst = max(statistics.median(ratios[name]) for name in list(ratios)[:2])
    return 1 if worst > arguments.allowed else 0


def compare(folder: Path, floats: int, repetitions: int) -> dict[str, list[float]]:
    """CPU seconds for a GB of each kind, in every turn."""
    federation = federation_of_two()
    throwaway(folder / "tls", federation.federation, federation.ids)
    manifest = publish(folder / "remote", federation, floats)
    source = Store(folder / "remote").round_dir(0) / SNAPSHOT_FILE
    ours, theirs = folder / "tls" / "0", folder / "tls" / "1"
    goal = folder / "received.safetensors"
    size = manifest.size
    kinds: dict[str, tuple[Any, Any]] = {
        "peers": (
            partial(serve, folder / "remote", federation, theirs),
            partial(fetch, federation, manifest, floats, goal, ours),
        ),
        "peers, bytes only": (
            partial(serve, folder / "remote", federation, theirs),
            partial(fetch, federation, manifest, floats, None, ours),
        ),
        "sockets": (partial(send, None, size, theirs), partial(receive, None, size, ours)),
        "sockets with files": (partial(send, source, size, theirs), partial(receive, goal, size, ours)),
    }
    found: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(repetitions):
        for name, (sending, taking) in kinds.items():
            found[name].append(1e9 / size * move(sending, taking))
            goal.unlink(missing_ok=True)
    return found


def move(sending: Callable[[Connection], None], taking: Callable[[Connection, Any], None]) -> float:
    """CPU seconds of both ends of one transfer; each begins to count when it is ready."""
    (there, its), (here, mine) = _SPAWN.Pipe(), _SPAWN.Pipe()
    sender = _SPAWN.Process(target=sending, args=(its,))
    sender.start()
    address = there.recv()
    receiver = _SPAWN.Process(target=taking, args=(mine, address))
    receiver.start()
    seconds = here.recv()
    there.send(None)
    seconds += there.recv()[0]
    sender.join()
    receiver.join()
    return float(seconds)


def fetch(
    federation: Federation, manifest: Manifest, floats: int, goal: Path | None, keys: Path, told: Connection, _: Any
) -> None:
    """One end of a transfer by peers: to a file, which is checked, or only the bytes."""

    async def drop() -> None:
        channel = dial(federation.peer(1).address, Tls(keys, federation.federation, 0), 1)
        request = peer_pb2.GetSnapshotRequest(peer=1, round=manifest.round, sha256=manifest.sha256)
        call = RawStub(channel).GetSnapshot(request)
        left = manifest.size
        while (raw := await call.read()) is not grpc.aio.EOF:
            left -= len(parse_chunk(raw)[1])
        assert not left
        await channel.close()

    async def fetch() -> None:
        async with receiving(federation, floats, keys) as (link, intake):
            before = time.process_time()
            await (drop() if goal is None else link.snapshot(manifest, goal, intake))
            told.send(time.process_time() - before)

    asyncio.run(fetch())


def send(path: Path | None, size: int, keys: Path, told: Connection) -> None:
    """One end of a transfer by sockets: the file, or so many bytes."""
    context = _context(keys, ssl.PROTOCOL_TLS_SERVER)
    with socket.create_server(("127.0.0.1", 0)) as server:
        told.send(server.getsockname())
        before = time.process_time()
        accepted = server.accept()[0]
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with context.wrap_socket(accepted, server_side=True) as connection:
            if path is None:
                piece = bytes(_PIECE)
                for at in range(0, size, _PIECE):
                    connection.sendall(piece if size - at >= _PIECE else piece[: size - at])
            else:
                with path.open("rb", buffering=0) as file:
                    at = 0
                    while data := os.pread(file.fileno(), _PIECE, at):
                        connection.sendall(data)
                        at += len(data)
            told.recv()
            told.send((time.process_time() - before, 0.0))


def receive(path: Path | None, size: int, keys: Path, told: Connection, address: Any) -> None:
    """The other end."""
    context = _context(keys, ssl.PROTOCOL_TLS_CLIENT)
    before = time.process_time()
    buffer, left = memoryview(bytearray(_PIECE)), size
    with context.wrap_socket(socket.create_connection(address)) as connection:
        assert connection.version() == "TLSv1.3"
        with Path(os.devnull if path is None else path).open("wb") as file:
            while left:
                count = connection.recv_into(buffer)
                left -= count
                if path is not None:
                    file.write(buffer[:count])
        if path is not None:
            sha256_file(path)
        told.send(time.process_time() - before)


def _context(keys: Path, protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.check_hostname, context.verify_mode = False, ssl.CERT_REQUIRED
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(keys / CA_FILE)
    context.load_cert_chain(keys / CERTIFICATE_FILE, keys / KEY_FILE)
    return context


if __name__ == "__main__":
    raise SystemExit(main())
