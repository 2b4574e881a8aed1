"""CPU time and memory of a process and of everything that it has started, daemons included, read from /proc (Linux).

Whoever was once seen below the root counts to the end, also when its parent has gone and it hangs below init: Ray's
workers do. Of a process that ends between two samples, what it took after the last one is lost.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_TICK = os.sysconf("SC_CLK_TCK")


class _Process(NamedTuple):
    """A number may be given again, so the time of its start belongs to a process's name."""

    pid: int
    started: int


class ProcessTree:
    """What is below one process of this user.

    Attributes:
        series: (monotonic seconds, CPU seconds of all so far), one entry a sample.
        peak_pss_bytes: the largest sum of proportional memory, in which a page that n processes share counts 1/n each.
    """

    def __init__(self, root: int) -> None:
        self._root = root
        self._cpu: dict[_Process, float] = {}
        self._alive: set[_Process] = set()
        self.series: list[tuple[float, float]] = []
        self.peak_pss_bytes = 0

    def sample(self) -> None:
        """Look once at the CPU time of all."""
        parents: dict[_Process, int] = {}
        seconds: dict[_Process, float] = {}
        ended: set[_Process] = set()  # which nobody has asked after yet
        for entry in os.listdir("/proc"):  # noqa: PTH208 (a few times a second: no objects for hundreds of names)
            if not entry.isdigit():
                continue
            with suppress(OSError):
                # The name in brackets may hold anything.
                fields = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()
                process = _Process(int(entry), int(fields[19]))
                parents[process] = int(fields[1])
                if fields[0] in "ZX":
                    ended.add(process)
                seconds[process] = (int(fields[11]) + int(fields[12])) / _TICK
        below = {process for process in parents if process.pid == self._root or process in self._cpu}
        while True:
            pids = {process.pid for process in below}
            more = {process for process, parent in parents.items() if parent in pids} - below
            if not more:
                break
            below |= more
        self._alive = below - ended
        self._cpu |= {process: seconds[process] for process in below}
        self.series.append((time.monotonic(), sum(self._cpu.values())))

    def sample_memory(self) -> None:
        """Look at the memory of those of the last sample. This takes the kernel milliseconds a process."""
        total = 0
        for process in self._alive:
            with suppress(OSError):
                for line in Path("/proc", str(process.pid), "smaps_rollup").read_text().splitlines():
                    if line.startswith("Pss:"):
                        total += int(line.split()[1]) * 1024
        self.peak_pss_bytes = max(self.peak_pss_bytes, total)

    def cpu_at(self, moment: float) -> float:
        """CPU seconds of all until then, between two samples by proportion."""
        before = (self.series[0][0], 0.0)
        for entry in self.series:
            if entry[0] >= moment:
                share = (moment - before[0]) / (entry[0] - before[0]) if entry[0] > before[0] else 1.0
                return before[1] + share * (entry[1] - before[1])
            before = entry
        return before[1]

    def end(self, patience: float) -> int:
        """Wait for what is left, then kill it; how many had to be killed."""
        deadline = time.monotonic() + patience
        self.sample()
        while self._alive and time.monotonic() < deadline:
            time.sleep(0.1)
            self.sample()
        for process in self._alive:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        return len(self._alive)
