"""What benchmarks need to run a mesh of real processes and to look at them: rounds, CPU seconds and memory."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_TICKS = os.sysconf("SC_CLK_TCK")
CORES = len(os.sched_getaffinity(0))


def add_options(parser: argparse.ArgumentParser, *, samples: int) -> None:
    """What a mesh is of: ``--data``, ``--samples``, ``--pool`` and ``--count``."""
    parser.add_argument("--data", type=Path, help="an npz file, in place of digits")
    parser.add_argument("--samples", type=int, default=samples, help="training images in all")
    parser.add_argument("--pool", default="resnet18,resnet18-half,cnn6")
    parser.add_argument("--count", type=int, default=10, help="peers")


def options_of(arguments: argparse.Namespace, rounds: int) -> list[str]:
    """The same for ``crad-mesh up``."""
    options = ["--dataset", f"npz:{arguments.data.resolve()}"] if arguments.data else []
    options += ["--samples", str(arguments.samples), "--pool", arguments.pool]
    return [*options, "--count", str(arguments.count), "--rounds", str(rounds)]


def described(arguments: argparse.Namespace) -> dict[str, Any]:
    """The same for the report."""
    data = arguments.data.stem if arguments.data else "digits"
    return {"data": data, "samples": arguments.samples, "pool": arguments.pool, "count": arguments.count}


@contextlib.contextmanager
def mesh(out: Path, options: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """``crad-mesh up`` with these options and one thread a learner; stopped at the end, if it still runs."""
    command = [sys.executable, "-P", "-m", "launch", "up", "--out", str(out), "--threads", "1", "--no-alone", *options]
    out.mkdir(parents=True, exist_ok=True)
    with (out / "output.txt").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            yield process
        finally:
            process.terminate()
            process.wait()


def check(process: subprocess.Popen[bytes], out: Path) -> None:
    """End the benchmark with the mesh's own words, if it has failed."""
    if process.poll():
        sys.exit((out / "output.txt").read_text(errors="replace"))


def rounds(out: Path, count: int) -> list[int]:
    """The last committed round of each peer; -1 before the first."""
    found = []
    for peer in range(count):
        folder = out / "peers" / str(peer) / "rounds"
        with contextlib.suppress(FileNotFoundError):
            found.append(max((int(each.name) for each in folder.iterdir() if each.name.isdigit()), default=-1))
    return found if len(found) == count else [-1]


def pids(out: Path, count: int, role: str) -> list[int]:
    """Of every peer's ``service`` or ``learner``."""
    return [int((out / "peers" / str(peer) / f"{role}.pid").read_text()) for peer in range(count)]


def cpu_seconds(processes: Sequence[int]) -> float:
    """User and system time that these have used so far."""
    total = 0
    for pid in processes:
        fields = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / _TICKS


def status_of(pid: int, name: str) -> int:
    """A number of /proc/PID/status."""
    found = re.search(rf"^{name}:\s+(\d+)", Path("/proc", str(pid), "status").read_text(), re.MULTILINE)
    assert found is not None, name
    return int(found[1])


def memory_mb(pid: int) -> float:
    """Resident memory, in megabytes of 1024 * 1024 bytes."""
    return status_of(pid, "VmRSS") / 1024


def proportional_mb(pid: int) -> float:
    """The same, but what several processes share is divided among them."""
    found = re.search(r"^Pss:\s+(\d+)", Path("/proc", str(pid), "smaps_rollup").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) / 1024
