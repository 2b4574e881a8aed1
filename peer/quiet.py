"""How often the log speaks of something that goes on: at once, and then ever more rarely."""

from __future__ import annotations

import time
from collections.abc import Callable

#: Seconds for which nothing more is said of the same: at first, and at last.
_FIRST, _LONGEST = 300.0, 86_400.0


class Quiet:
    """Remembers of what has been spoken, in bounded memory.

    Args:
        most: things that are remembered; the rest is one.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, most: int = 200) -> None:
        self._clock = clock
        self._most = most
        self._known: dict[object, tuple[float, float]] = {}  # until when nothing is said, and for how long

    def may_speak(self, of: object) -> bool:
        """Whether it is time; if so, not again for a while."""
        now = self._clock()
        if of not in self._known and len(self._known) >= self._most:
            self._known = {key: (until, pause) for key, (until, pause) in self._known.items() if now < until + pause}
            of = of if len(self._known) < self._most else None
        until, pause = self._known.get(of, (now, _FIRST / 2))
        if now < until:
            return False
        pause = min(2 * pause, _LONGEST)
        self._known[of] = now + pause, pause
        return True
