"""When a peer that has finished may leave: decisions alone, without clock, socket or file.

It serves on as long as somebody may need it, and as long as the last models of others are still on their way. Those are
copies, for peers that lose their disk one day: nobody learns from them, so a line that is cut does not count.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Collection

#: Seconds that a peer which had finished serves when it is started again, for one that has lost its disk since; and
#: after which it no longer waits for copies whose owners are all out of reach.
RETURN = 5.0


class Verdict(enum.Enum):
    """What to do now."""

    STAY = enum.auto()
    LEAVE = enum.auto()  # nobody needs this peer any more
    TIME_IS_OVER = enum.auto()  # somebody may, and has not moved a byte for the linger time


class Leaving:
    """The end of one peer; times in seconds of any one clock.

    Args:
        now: when its last round was evaluated.
        linger: for how long it serves on, counted from the last byte of a snapshot that moved.
        had_finished: whether all others had everything before this start.

    Attributes:
        gave_up: copies are not waited for any more, since their owners are out of reach.
    """

    def __init__(self, now: float, linger: float, *, had_finished: bool) -> None:
        self.gave_up = False
        self._linger = linger
        self._leave_at = now + linger
        self._extra = min(linger, RETURN) if had_finished else 0.0
        self._stay_until = now + self._extra
        self._out_of_reach_since = math.inf
        self._moved: int | None = None

    def look(
        self, now: float, *, late: Collection[int], wanted: Collection[int], connected: Collection[int], moved: int
    ) -> Verdict:
        """Decide.

        Args:
            late: others that may still come for something.
            wanted: others whose last snapshot is not here yet.
            connected: others that can be reached.
            moved: bytes of snapshots, sent and received, since the start.
        """
        if self._moved not in (None, moved):
            self._leave_at = now + self._linger
            self._stay_until = now + self._extra
        self._moved = moved
        if not wanted or any(j in connected for j in wanted):
            self._out_of_reach_since = math.inf
        else:
            self._out_of_reach_since = min(self._out_of_reach_since, now)
            self.gave_up = self.gave_up or now - self._out_of_reach_since >= RETURN
        if now >= self._leave_at:
            return Verdict.TIME_IS_OVER if late or wanted else Verdict.LEAVE
        is_served = not late and (not wanted or self.gave_up)
        return Verdict.LEAVE if is_served and now >= self._stay_until else Verdict.STAY

    def wake_at(self, now: float) -> float:
        """When time alone may change the verdict."""
        times = (self._leave_at, self._stay_until, self._out_of_reach_since + RETURN)
        return min(time for time in (*times, math.inf) if time > now)
