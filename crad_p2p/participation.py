"""Who takes part in which round: with ``participation: K``, a draw that every peer makes alike, without a word.

Everybody publishes round 0. In a round r ≥ 1 the K active peers train and publish, and teach one another; what a peer
published last stands for it meanwhile: its *version* as of a round. docs/participation.md says what follows.

Free of torch and numpy: the service asks, too.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from crad_p2p.randomness import drawn_number

_PURPOSE = "participation"


class Schedule:
    """The draw of every round.

    Args:
        ids: of all peers.
        rounds: R, the last round.
        seed: of the federation.
        active: K, the peers that take part in a round.
    """

    def __init__(self, ids: Iterable[int], rounds: int, seed: int, active: int) -> None:
        self.ids = tuple(sorted(ids))
        self.rounds, self.seed, self.size = rounds, seed, active
        self._active = [frozenset(self.ids)]
        self._rounds_of = {peer: [0] for peer in self.ids}
        for number in range(1, rounds + 1):
            self._active.append(frozenset(self._draw(number)))
            for peer in self._active[-1]:
                self._rounds_of[peer].append(number)

    def active(self, number: int) -> tuple[int, ...]:
        """The peers that publish this round, ascending."""
        return tuple(sorted(self._active[number]))

    def takes_part(self, peer: int, number: int) -> bool:
        """Whether a peer publishes this round."""
        return 0 <= number <= self.rounds and peer in self._active[number]

    def version(self, peer: int, number: int) -> int:
        """The round of a peer's newest snapshot once all rounds up to this one are over."""
        rounds = self._rounds_of[peer]
        return rounds[bisect_right(rounds, number) - 1]

    def following(self, peer: int, number: int) -> int | None:
        """The first round after this one in which a peer takes part; None if there is none."""
        rounds = self._rounds_of[peer]
        place = bisect_right(rounds, number)
        return rounds[place] if place < len(rounds) else None

    def takes_snapshot(self, taker: int, owner: int, number: int) -> bool:
        """Whether a peer fetches what ``owner`` has published as this round.

        Those do who train beside its owner the next time: they learn from just this snapshot. From its last one nobody
        learns; those who trained beside it keep a copy, should its owner lose its disk. An initial model that nobody
        learns from can be made again.
        """
        following = self.following(owner, number)
        if following is None and number == 0:
            return False
        return taker != owner and taker in self._active[number if following is None else following]

    def _draw(self, number: int) -> list[int]:
        """Each peer draws a number of its own; the lowest take part. No generator's algorithm has a say in it."""
        drawn = {peer: drawn_number(self.seed, _PURPOSE, peer=peer, round_number=number) for peer in self.ids}
        return sorted(self.ids, key=drawn.__getitem__)[: self.size]


@lru_cache(maxsize=16)
def drawn_schedule(ids: tuple[int, ...], rounds: int, seed: int, active: int) -> Schedule:
    """The schedule of a federation, drawn once a process."""
    return Schedule(ids, rounds, seed, active)


@dataclass(frozen=True)
class Part:
    """A schedule as one peer sees it."""

    schedule: Schedule
    me: int

    def is_active(self, number: int) -> bool:
        """Whether this peer trains this round."""
        return self.schedule.takes_part(self.me, number)

    def version(self, peer: int, number: int) -> int:
        """As :meth:`Schedule.version`."""
        return self.schedule.version(peer, number)

    def takes(self, peer: int, number: int) -> bool:
        """Whether this peer fetches the version of another one as of this round."""
        return self.schedule.takes_snapshot(self.me, peer, self.version(peer, number))
