"""Runs that are handed to a scheduler, which begins them when it has room for them.

What they do is told by their shared folders and by reports; how those come is the scheduler's business.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from crad_p2p.errors import ConfigurationError
from launch.engines import LOG, Began, Ended, Job
from launch.engines.node import Report

_LOOK_SECONDS = 0.5
#: After that the next ones wait for the next turn, so that the caller can show something.
_SUBMIT_SECONDS = 0.5
#: A scheduler that has refused a run, perhaps since it has too many, is asked again when one is over, or so much later.
_ASK_AGAIN_SECONDS = 60.0
#: What a node has written is seen here after so long at most; shared filesystems remember what was not there.
_ARRIVAL_SECONDS = 90.0


class RefusedError(ConfigurationError):
    """A scheduler does not take a run."""


class Scheduler(Protocol):
    """Of a cluster."""

    #: In what computes there: ``cpu`` or ``cuda``.
    device: str

    def submit(self, job: Job) -> Callable[[], Report | None]:
        """Hand a run over.

        Returns:
            That says how it has ended, or None while it has not.

        Raises:
            RefusedError: it is not taken.
        """
        ...

    def close(self) -> None:
        """End all that was handed over and is not over, and leave the cluster."""
        ...


@dataclass
class _Given:
    job: Job
    ask: Callable[[], Report | None]
    began: bool = False
    report: Report | None = None
    since: float = 0.0


class ScheduledEngine:
    """Makes runs by a scheduler; it is closed when they are over.

    Args:
        jobs: so many are with the scheduler at once, at most; None hands over all.
        clock: seconds.
        sleep: for so many seconds.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        jobs: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._scheduler = scheduler
        self._jobs = jobs
        self._clock, self._sleep = clock, sleep

    def run(self, jobs: Sequence[Job]) -> Generator[Sequence[Began | Ended], None, None]:
        """See :class:`launch.engines.Engine`."""
        waiting = deque(jobs)
        given: list[_Given] = []
        ask_again = self._clock()
        try:
            while waiting or given:
                happened: list[Began | Ended] = []
                for each in list(given):
                    events = self._news(each)
                    happened += events
                    if any(isinstance(event, Ended) for event in events):
                        given.remove(each)
                        ask_again = self._clock()
                until = self._clock() + _SUBMIT_SECONDS
                while (
                    waiting and (self._jobs is None or len(given) < self._jobs) and ask_again <= self._clock() <= until
                ):
                    try:
                        given.append(_Given(waiting[0], self._scheduler.submit(waiting[0])))
                    except RefusedError:
                        if not given:  # nothing that could make room
                            raise
                        ask_again = self._clock() + _ASK_AGAIN_SECONDS
                    else:
                        waiting.popleft()
                yield happened
                if given:
                    self._sleep(_LOOK_SECONDS)
        finally:
            self._scheduler.close()

    def _news(self, given: _Given) -> list[Began | Ended]:
        events: list[Began | Ended] = []
        if given.report is None:
            given.report = given.ask()
            given.since = self._clock()
        if not given.began and (given.report is not None or (given.job.folder / LOG).exists()):
            given.began = True
            events.append(Began(given.job, self._scheduler.device))
        if given.report is not None and (
            arrived(given.job.folder, given.report) or self._clock() >= given.since + _ARRIVAL_SECONDS
        ):
            events.append(Ended(given.job, given.report.code, given.report.why))
        return events


def arrived(folder: Path, report: Report) -> bool:
    """Is everything that a node has written into this folder seen here?"""
    try:
        return all((folder / name).stat().st_size == size for name, size in report.sizes.items())
    except OSError:
        return False
