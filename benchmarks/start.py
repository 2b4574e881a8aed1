"""How long does a local mesh take to its first training step, and how much memory do its processes hold together?

    python benchmarks/start.py                         # the demonstration's ten peers, five times: a minute
    python benchmarks/start.py --count 100 --runs 1 --threads 1
    python benchmarks/start.py --without-fork-server   # every learner imports torch by itself

``crad-mesh up`` is started again and again, in new directories, and stopped when all peers have published round 1. The
first run only warms the file cache, and is not counted. A peer begins to train when its service decides so, which its
recorded events tell to the millisecond. Until then the mesh has spent the CPU seconds printed, of all its processes;
where other work kept the cores busy meanwhile, they say more than the seconds on the clock. Memory is the proportional
set size, so what processes share counts once; it is looked at while round 1 is trained.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from report import in_words, spread, write

_TICKS = os.sysconf("SC_CLK_TCK")
#: ``crad-mesh``, with and without a fork server.
_WITH = [sys.executable, "-P", "-m", "launch"]
_WITHOUT = [
    *(sys.executable, "-P", "-c"),
    "import crad_p2p.forking, launch.cli; crad_p2p.forking.is_supported = lambda: False; launch.cli.main()",
]


@dataclass(frozen=True)
class Run:
    """Of one start: seconds from the command to the first and to the last peer's first training step; CPU seconds of
    all processes until then, and the share of the cores that others used meanwhile; megabytes at the peak in all, and
    of a learner and a service, and those that a learner shares with nobody.
    """

    first: float
    last: float
    cpu: float
    others: float
    memory: float
    learner: float
    service: float
    own: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, help="of each learner")
    parser.add_argument("--samples", type=int, help="training images in all")
    parser.add_argument("--without-fork-server", action="store_true")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    command = _WITHOUT if arguments.without_fork_server else _WITH
    command = [*command, "up", "--count", str(arguments.count), "--rounds", "2", "--no-alone"]
    for name in ("threads", "samples"):
        if (value := getattr(arguments, name)) is not None:
            command += [f"--{name}", str(value)]
    runs = []
    for number in range(arguments.runs + 1):
        with tempfile.TemporaryDirectory() as folder:
            run = start(command, arguments.count, Path(folder, "run"))
        print(f"{'warm-up' if not number else f'run {number}'}: {run}")
        runs += [run] if number else []
    words = {
        "first": "seconds to the first training step",
        "last": "seconds until all peers train",
        "cpu": "CPU seconds until then",
        "others": "share of the cores used by others",
        "memory": "memory of all processes (MB)",
        "learner": "memory of a learner (MB)",
        "service": "memory of a service (MB)",
        "own": "of a learner, not shared (MB)",
    }
    figures = {name: [getattr(run, name) for run in runs] for name in words}
    for name, values in figures.items():
        print(f"{words[name]:36}{in_words(values)}")
    write(
        arguments.json,
        "start",
        {
            "peers": arguments.count,
            "fork_server": not arguments.without_fork_server,
            **{name: spread(values) for name, values in figures.items()},
        },
    )


def start(command: list[str], count: int, out: Path) -> Run:
    """Run it to round 1."""
    begun, busy = time.monotonic(), busy_seconds()
    process = subprocess.Popen([*command, "--out", str(out)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    cpu = others = memory = own = 0.0
    peak: dict[str, float] = defaultdict(float)
    try:
        while len(list(out.glob("peers/*/rounds/000001"))) < count:
            if process.poll() is not None:
                sys.exit(process.communicate()[0].decode())
            if not cpu and len(times := training_since(out)) == count:
                cpu = sum(map(cpu_seconds, descendants(process.pid)))
                others = busy_seconds() - busy - cpu
                others /= (time.monotonic() - begun) * (os.cpu_count() or 1)
            if cpu:
                sizes = {pid: megabytes(pid) for pid in descendants(process.pid)}
                memory = max(memory, sum(sizes.values()))
                for pid, size in sizes.items():
                    peak[kind(pid)] = max(peak[kind(pid)], size)
                    if kind(pid) == "learner":
                        own = max(own, megabytes(pid, "Private_Dirty"))
            time.sleep(0.1)
        times = training_since(out)
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate()
    first, last = min(times) - begun, max(times) - begun
    return Run(first, last, cpu, others, memory, peak["learner"], peak["service"], own)


def training_since(out: Path) -> list[float]:
    """The times of the monotonic clock at which peers have begun to train round 1."""
    times = []
    for path in out.glob("peers/*/events.jsonl"):
        for line in path.read_text().splitlines():
            if '"Train"' in line and line.endswith("}"):
                times.append(json.loads(line)["now"])
                break
    return times


def descendants(pid: int) -> Iterator[int]:
    """A process and all that come from it."""
    children = defaultdict(list)
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            children[int(path.read_text().rpartition(")")[2].split()[1])].append(int(path.parent.name))
        except OSError:
            continue
    found = [pid]
    for each in found:
        found += children[each]
    return iter(found)


def cpu_seconds(pid: int) -> float:
    """Of a process, and of its children that have ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / _TICKS


def busy_seconds() -> float:
    """Of all cores since the machine was started."""
    user, nice, system, _, _, irq, soft = map(int, Path("/proc/stat").read_text().split()[1:8])
    return (user + nice + system + irq + soft) / _TICKS


def megabytes(pid: int, what: str = "Pss") -> float:
    """By default the proportional set size."""
    try:
        found = re.search(rf"^{what}:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.M)
    except OSError:
        return 0.0
    return int(found[1]) / 1024 if found else 0.0


def kind(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return "gone"
    names = {"crad_p2p.forking": "other", "crad_p2p.learner": "learner", "peer": "service"}
    return next((names[word] for word in words if word in names), "other")


if __name__ == "__main__":
    main()
