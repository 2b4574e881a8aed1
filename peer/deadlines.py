"""How long a round waits for a peer under policy ``quorum``: derived from what the peers' rounds have taken so far."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

#: A peer gets so many times the longest of its recent rounds: they vary, and some end with an evaluation.
_FACTOR = 2.0
#: Rounds that count as recent: as many as lie between two evaluations by default.
_RECENT = 10
#: What is known of a peer counts up to so many times the median of what all say; else a liar could hold up everybody.
_BELIEVED = 30.0


@dataclass
class RoundTimes:
    """Recent round times in seconds, by peer id: what each peer says it worked, and when its snapshot was here."""

    said: dict[int, list[float]] = field(default_factory=dict)
    seen: dict[int, list[float]] = field(default_factory=dict)

    def say(self, peer: int, seconds: float) -> None:
        """A peer has worked so long for a round."""
        _append(self.said, peer, seconds)

    def see(self, peer: int, seconds: float) -> None:
        """A peer's snapshot was here so long after this peer began to wait for it."""
        _append(self.seen, peer, seconds)

    def of(self, peer: int) -> float | None:
        """The longest recent round of a peer; None if it has not said how long its rounds take.

        What is seen alone would be too little: a snapshot that was there before this peer began to wait took no time.
        """
        if peer not in self.said:
            return None
        # Of two the lower counts: a liar must not be half of its own judge.
        believed = _BELIEVED * statistics.median_low(map(max, self.said.values()))
        return min(believed, max(self.said[peer] + self.seen.get(peer, [])))

    def allowance(self, peer: int, grace: float) -> float | None:
        """Seconds that a peer gets for a round; None if nothing is known of it."""
        longest = self.of(peer)
        return None if longest is None else grace + _FACTOR * longest

    def common_allowance(self, grace: float) -> float | None:
        """The longest allowance of any peer; None if nothing is known of anybody."""
        return max((known for peer in self.said if (known := self.allowance(peer, grace)) is not None), default=None)


def _append(times: dict[int, list[float]], peer: int, seconds: float) -> None:
    times[peer] = [*times.get(peer, []), max(0.0, seconds)][-_RECENT:]
