"""Rounds of one client among any number of peers, with data drawn at random: what they cost, as JSON on one line.

    python benchmarks/one_client.py FOLDER COUNT SAMPLES CLASSES POOL ROUNDS DEVICE

Used by other benchmarks, each time in a process of its own, so that its peak memory is that of these rounds. FOLDER
keeps one snapshot of each architecture, which all its teachers share: what they know does not matter here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from crad_p2p import weights
from crad_p2p.architectures import build_model, initialise
from crad_p2p.client import Client
from crad_p2p.data.datasets import Dataset, ImageSet
from crad_p2p.data.partition import Split
from crad_p2p.device import resolve_precision
from crad_p2p.federation import build_federation
from crad_p2p.manifest import ClassStatistics, Manifest
from crad_p2p.memory import peak_rss_bytes

SIDE = 32


def in_own_process(
    folder: Path, *, count: int, samples: int, classes: int, pool: str, rounds: int, device: str = "cpu"
) -> dict[str, Any]:
    """CPU seconds a round by phase and peak memory, measured in a new process.

    Args:
        folder: for snapshots; made by the first call.
        count: peers N, so N - 1 teachers.
        samples: training images of the client; a quarter as many are its validation samples.
    """
    _make_snapshots(folder, classes, pool)
    command = [sys.executable, __file__, str(folder), str(count), str(samples), str(classes), pool, str(rounds), device]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)  # type: ignore[no-any-return]


def _path(folder: Path, arch: str, classes: int) -> Path:
    return folder / f"{arch}-{classes}.safetensors"


def _make_snapshots(folder: Path, classes: int, pool: str) -> None:
    for arch in pool.split(","):
        path = _path(folder, arch, classes)
        if not path.exists():
            model = build_model(arch, classes=classes, channels=3)
            initialise(model, 0)
            path.write_bytes(weights.encode(model.state_dict()))


def main() -> None:
    if len(sys.argv) != 8:
        sys.exit(__doc__)
    folder, pool = Path(sys.argv[1]), sys.argv[5].split(",")
    count, samples, classes, rounds = map(int, (*sys.argv[2:5], sys.argv[6]))
    torch.set_num_threads(1)
    device = torch.device(sys.argv[7])
    peers = [{"id": i, "address": f"127.0.0.1:{7000 + i}", "arch": pool[i % len(pool)]} for i in range(count)]
    federation = build_federation({"federation": "one-round", "rounds": 2, "peers": peers}, "the benchmark")
    client = Client(
        federation,
        0,
        random_data(samples, classes),
        split(samples),
        device=device,
        precision=resolve_precision("auto", device),
        folder=Path(tempfile.mkdtemp(dir=folder)),
    )
    client.initialise()
    ready = peak_rss_bytes()
    seconds = dict.fromkeys(("teachers", "train", "validate"), 0.0)
    for _ in range(rounds):
        clock = [time.process_time()]
        client.open_round()
        for peer in range(1, count):
            client.teach(_manifest(peer, federation.peer(peer).arch, classes), _read(folder, federation, peer, classes))
        clock.append(time.process_time())
        client.train(range(1, count), lambda: (b"", b""))
        clock.append(time.process_time())
        client.validate()
        clock.append(time.process_time())
        for name, before, after in zip(seconds, clock, clock[1:], strict=False):
            seconds[name] += (after - before) / rounds
    client.close()
    found = {"cpu_seconds": seconds, "peak_rss_bytes": peak_rss_bytes(), "ready_rss_bytes": ready}
    if device.type == "cuda":
        found["peak_device_bytes"] = torch.cuda.max_memory_allocated(device)
    print(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)


def random_data(samples: int, classes: int) -> Dataset:
    """RGB images, with a few for the test."""
    generator = np.random.default_rng(0)
    total = samples + samples // 4

    def images(n: int) -> ImageSet:
        return ImageSet(
            generator.integers(0, 256, (n, 3, SIDE, SIDE), dtype=np.uint8), generator.integers(0, classes, n)
        )

    names = tuple(map(str, range(classes)))
    return Dataset("random", images(total), images(16), names, (0.5,) * 3, (0.25,) * 3, "crop")


def split(samples: int) -> Split:
    """Everything to train on, and a quarter more to validate on."""
    rest = np.arange(samples, samples + samples // 4)
    return Split(np.arange(samples), rest[::2], rest[1::2])


def _manifest(peer: int, arch: str, classes: int) -> Manifest:
    return Manifest(
        run="0" * 64,
        peer=peer,
        round=0,
        arch=arch,
        size=1,
        sha256="0" * 64,
        statistics=ClassStatistics(counts=(5,) * classes, hits=(3,) * classes, predicted=(5,) * classes),
        consumed=(),
        model_round=0,
        missing=(),
        quarantined=(),
    )


def _read(folder: Path, federation: Any, peer: int, classes: int) -> bytes:
    return _path(folder, federation.peer(peer).arch, classes).read_bytes()


if __name__ == "__main__":
    main()
