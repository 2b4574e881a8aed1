"""One try after another of what has to work in the end, with pauses between, and no line of the log twice."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress

from peer.waiting import within

#: Seconds between the first two tries, and between two of many; who sends what must not be used is not asked again so
#: soon. For a peer that is not there, among many, see :func:`between_tries`.
_FIRST, _LONGEST, LONGEST_AFTER_DAMAGE = 0.1, 0.8, 5.0


def between_tries(members: int) -> float:
    """Seconds after which a peer that is not there is called again.

    An attempt to connect may have taken four when the link heals, and traffic resumes within five. But where many peers
    begin on one machine, the calls of those who are there must leave the others the time to start: it grows so that all
    together do not call more often. Who has started calls, and is called back at once.
    """
    return min(30.0, max(_LONGEST, members**2 / 350))


class Attempt:
    """One try of something that is repeated until it works."""

    def __init__(self) -> None:
        self._last_message = ""
        self._said: deque[str] = deque(maxlen=8)
        self._delay, self._longest = _FIRST, _LONGEST

    def succeeded(self) -> None:
        """Later failures are news again, and retried at once."""
        self._delay, self._last_message = _FIRST, ""
        self._said.clear()

    def failed(
        self, log: logging.Logger, message: str, *, longest: float = _LONGEST, level: int = logging.INFO
    ) -> bool:
        """Log a failure, unless that was said before; whether it is the same as the last one."""
        is_repeated = message == self._last_message
        self.say(log, message, level)
        self._last_message, self._longest = message, longest
        return is_repeated

    def say(self, log: logging.Logger, message: str, level: int = logging.INFO) -> None:
        """Log it, unless that was said before."""
        if message not in self._said:
            self._said.append(message)
            log.log(level, message)

    async def pause(self, until: asyncio.Event) -> None:
        """Longer each time, and of random length, so that many peers do not call in step; the event ends it, but for
        its first part.
        """
        delay = min(self._delay, self._longest)
        first = min(delay, _LONGEST) / 2
        await asyncio.sleep(first)
        with suppress(TimeoutError):
            await within(random.uniform(delay / 2, delay) - first, until.wait())
        self._delay = min(2 * self._delay, max(self._longest, LONGEST_AFTER_DAMAGE))
        if until.is_set():
            self._delay = _FIRST


async def attempts(sooner: asyncio.Event | None = None) -> AsyncIterator[Attempt]:
    """Yields for ever, with pauses, which the event may shorten."""
    attempt, never = Attempt(), asyncio.Event()
    while True:
        yield attempt
        await attempt.pause(sooner or never)
