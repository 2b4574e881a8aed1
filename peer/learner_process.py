"""The learner as the service sees it: a process that takes commands and sends events (``crad_p2p.learner``).

It is a child of the service, or of a fork server that has imported torch already (``crad_p2p.forking``), where the
environment names one: ``crad-mesh up`` has one for all its learners.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from crad_p2p import forking
from peer.forked import Forked
from peer.waiting import within

logger = logging.getLogger(__name__)

#: Longest line of the learner; ``ready`` carries the layouts of all architectures.
_LINE_BYTES = 16 << 20
#: Seconds a learner has to end by itself before it is killed.
_GRACE = 3.0


class _Input(Protocol):
    def write(self, data: bytes) -> None: ...
    def close(self) -> None: ...
    def is_closing(self) -> bool: ...


class Process(Protocol):
    """What asyncio's subprocesses and :class:`peer.forked.Forked` have in common."""

    @property
    def pid(self) -> int: ...
    @property
    def stdin(self) -> _Input | None: ...
    @property
    def stdout(self) -> asyncio.StreamReader | None: ...
    async def wait(self) -> int: ...
    def kill(self) -> None: ...


class LearnerProcess:
    """One run of the learner."""

    def __init__(self, process: Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, arguments: Sequence[str]) -> LearnerProcess:
        """Start it with these command-line arguments. Its standard error is the service's."""
        return cls(await _fork(arguments) or await _execute(arguments))

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, do: str, **fields: Any) -> None:
        """Queue a command. A learner that is gone misses it, and its end is seen in :meth:`events`."""
        assert self._process.stdin is not None
        if not self._process.stdin.is_closing():
            self._process.stdin.write(json.dumps({"do": do, **fields}).encode() + b"\n")

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """What it says, until it ends."""
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            if line.endswith(b"\n"):  # a killed process can leave half a line
                yield json.loads(line)

    async def wait(self) -> int:
        """Exit status, negative for a signal."""
        return await self._process.wait()

    async def stop(self) -> None:
        """End it: by closing its input, and by force if that is not enough."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            await within(_GRACE, self._process.wait())
        except TimeoutError:
            self._process.kill()
            await self._process.wait()


async def _fork(arguments: Sequence[str]) -> Process | None:
    """None if there is no fork server, or it does not do it."""
    path = os.environ.get(forking.NAME)
    if not path:
        return None
    try:
        return await Forked.start(Path(path), arguments, limit=_LINE_BYTES)
    except OSError as error:
        logger.info("the learner is not forked (%s); it is started like any other process", error)
        return None


async def _execute(arguments: Sequence[str]) -> Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",  # a folder named like one of ours, where the user happens to be, must not be imported
        "-m",
        "crad_p2p.learner",
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=_LINE_BYTES,
    )


def how_it_ended(status: int) -> str:
    """Of an exit status, for a sentence."""
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
