"""Runs as processes of this machine: as many at once as it has cores and memory for."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass

from launch.engines import Began, Ended, Job, Need
from launch.engines.process import start

#: Part of the free memory that runs may take: an estimate is none.
_USABLE = 0.9
_LOOK_SECONDS = 0.5


@dataclass(frozen=True)
class Device:
    """Where runs can compute: ``cpu``, ``mps``, ``cuda:0``.

    Attributes:
        free: bytes of its own memory; None if it shares the machine's.
    """

    name: str
    free: int | None = None


@dataclass(frozen=True)
class Machine:
    """What there is when nothing has been begun.

    Attributes:
        free: bytes of memory; None if the system does not say.
    """

    cores: int
    free: int | None
    devices: tuple[Device, ...]


def place(machine: Machine, running: Sequence[tuple[Need, str]], need: Need, jobs: int | None) -> str | None:
    """The device for one more run beside those that run; None if it has to wait for one of them to end.

    A run has one thread, so there are never more than cores. If nothing runs, there is always room: nobody else can say
    whether a run that looks too large fits.

    Args:
        running: what each takes, and where it computes.
        jobs: that many at once, whatever the estimates say.
    """
    on = {device.name: [taken for taken, where in running if where == device.name] for device in machine.devices}
    least_used = min(machine.devices, key=lambda device: len(on[device.name]))
    if not running:
        return least_used.name
    if jobs is not None:
        return least_used.name if len(running) < jobs else None
    if len(running) >= machine.cores:
        return None
    host = sum(taken.host for taken, _ in running) + need.host
    if machine.free is not None and host > _USABLE * machine.free:
        return None
    for device in sorted(machine.devices, key=lambda device: len(on[device.name])):
        taken = on[device.name]
        if not taken or device.free is None:
            return device.name
        if sum(each.device for each in taken) + need.device <= _USABLE * device.free:
            return device.name
    return None


class LocalEngine:
    """Processes of this machine, which end with this one, however that ends.

    Args:
        jobs: that many at once; None leaves it to :func:`place`.
    """

    def __init__(self, machine: Machine, jobs: int | None = None) -> None:
        self._machine = machine
        self._jobs = jobs

    def run(self, jobs: Sequence[Job]) -> Generator[Sequence[Began | Ended], None, None]:
        """See :class:`launch.engines.Engine`."""
        waiting = list(jobs)
        running: list[tuple[Job, str, subprocess.Popen[bytes]]] = []
        try:
            while waiting or running:
                happened: list[Began | Ended] = []
                for each in [each for each in running if each[2].poll() is not None]:
                    running.remove(each)
                    happened.append(Ended(each[0], each[2].returncode))
                while waiting:
                    taken = [(job.need, device) for job, device, _ in running]
                    device = place(self._machine, taken, waiting[0].need, self._jobs)
                    if device is None:
                        break
                    job = waiting.pop(0)
                    running.append((job, device, start(job.folder, job.arguments(device))))
                    happened.append(Began(job, device))
                yield happened
                if running:
                    time.sleep(_LOOK_SECONDS)
        finally:
            for _, _, process in running:
                process.kill()
            for _, _, process in running:
                process.wait()
