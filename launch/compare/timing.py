"""How long the runs that are left will take, from those that have been made and the rounds of those that run."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from crad_p2p.results import mean
from launch.compare.plan import Planned

_REMEMBERED_SECONDS = 60.0


@dataclass(frozen=True)
class Known:
    """What is known of the speed of a run: so many rounds in so many seconds."""

    planned: Planned
    rounds: int
    seconds: float

    @property
    def per_round(self) -> float:
        return self.seconds / self.rounds


class SideBySide:
    """How many runs go side by side: the most of the last minute, since one that is over and the next one that begins
    are not seen in the same moment. A cluster may have room for more now, or for fewer, than it had before.
    """

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def of(self, now: float, running: int) -> int:
        """
        Args:
            now: seconds.
            running: so many go on.

        Returns:
            At least 1.
        """
        while self._seen and self._seen[0][0] < now - _REMEMBERED_SECONDS:
            self._seen.popleft()
        while self._seen and self._seen[-1][1] <= running:  # nobody asks for those any more
            self._seen.pop()
        self._seen.append((now, running))
        return max(1, self._seen[0][1])


def seconds_left(
    waiting: Sequence[Planned], running: Sequence[Known], finished: Sequence[Known], at_once: int
) -> float | None:
    """Seconds until the last run ends, if each that is free begins the next one; None before any round is done.

    A run that has no speed of its own yet goes as fast as others of its method and setting, else of its setting, else
    as all in proportion to the peers that learn.

    Args:
        running: with the rounds that each has done, and its seconds so far.
        at_once: how many run side by side.
    """
    known = [each for each in (*finished, *running) if each.rounds > 0]
    if not known:
        return None
    ends = []
    for each in running:
        speed = each.per_round if each.rounds > 0 else _speed(each.planned, known)
        total = speed * each.planned.federation.rounds
        ends.append(max(0.0, total - each.seconds))
    ends += [0.0] * max(0, at_once - len(ends))
    heapq.heapify(ends)
    for planned in waiting:
        heapq.heapreplace(ends, ends[0] + _speed(planned, known) * planned.federation.rounds)
    return max(ends)


def _speed(planned: Planned, known: Sequence[Known]) -> float:
    """Seconds a round."""
    alike = [each for each in known if each.planned.setting == planned.setting]
    same = [each for each in alike if each.planned.method == planned.method]
    if found := mean(each.per_round for each in same or alike):
        return found
    return planned.active * (mean(each.per_round / each.planned.active for each in known) or 0.0)
