"""The end of a peer that has finished: it serves while somebody may need it, takes its leave, and says what was amiss.

When it may leave is decided in :mod:`peer.leaving`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping

from crad_p2p.errors import ReservationsError
from crad_p2p.federation import Federation
from peer.barrier import Barrier
from peer.exchange import Exchange
from peer.leaving import RETURN, Leaving, Verdict
from peer.reservations import reservations
from peer.status import Status
from peer.store import Store
from peer.words import name_peers

logger = logging.getLogger(__name__)

#: Seconds that watchers get to read the last state.
_FAREWELL = 5.0


class Ending:
    """Begins when the last round is evaluated.

    Args:
        linger: seconds for which this peer serves on, counted from the last byte of a snapshot that moved.
        had_served_all: whether all others had everything before this start.
    """

    def __init__(
        self,
        federation: Federation,
        store: Store,
        status: Status,
        barrier: Barrier,
        exchange: Exchange,
        *,
        linger: float,
        had_served_all: bool,
    ) -> None:
        self._rounds = federation.rounds
        self._store = store
        self._status = status
        self._barrier = barrier
        self._exchange = exchange
        self._linger = linger
        self._leaving = Leaving(time.monotonic(), linger, had_finished=had_served_all)
        self._left_behind: tuple[int, ...] = ()  # had not said that they have everything when the time was over
        if had_served_all:  # somebody may have lost its disk since
            seconds = min(linger, RETURN)
            logger.info("all have had what they need; serving %g s more, should one come that lost its disk", seconds)
        elif self._late() or not barrier.state.released:
            logger.info(
                "serving on until every other peer has what it needs, %g s at most after the last byte that moves",
                linger,
            )
        status.update(phase="linger", step=0, steps=0)

    def wake_at(self, now: float) -> float:
        """When, on the monotonic clock, time alone may let this peer leave."""
        return self._leaving.wake_at(now)

    def may_leave(self, moved: int) -> bool:
        """Whether this peer may leave now.

        Args:
            moved: bytes of snapshots, sent and received, since the start.
        """
        late, state = self._late(), self._barrier.state
        wanted = () if state.released else self._barrier.waited_for
        gave_up = self._leaving.gave_up
        verdict = self._leaving.look(time.monotonic(), late=late, wanted=wanted, connected=state.connected, moved=moved)
        if self._leaving.gave_up and not gave_up:
            logger.info("nobody learns from the last models of %s, which cannot be reached now", name_peers(wanted))
            self._status.update(collected=self._rounds)  # so that this peer keeps nobody
        if verdict is Verdict.TIME_IS_OVER:
            if late:
                who = name_peers(late)
                logger.warning("leaving after %g s, though %s may not have everything", self._linger, who)
            else:
                logger.info("leaving after %g s: %s", self._linger, self._barrier.explain())
            self._left_behind = late
        return verdict is not Verdict.STAY

    async def say_farewell(self) -> None:
        """Let the others read that this peer leaves, and has collected everything; else they linger for it."""
        await self._status.followed_by(self._barrier.state.connected, _FAREWELL)  # some may only just have come up
        self._status.update(phase="done", leaving=True)
        if not await self._status.drained(_FAREWELL):
            logger.info("someone still watches; leaving all the same")

    def say_reservations(self) -> None:
        """End with more than a word if the run was not as it should be.

        Raises:
            ReservationsError: it was not.
        """
        reasons = reservations(
            self._store.history(),
            away=self._barrier.uncollected,
            behind=self._left_behind,
            refused=self._store.refused(self._rounds),
            conflicts=self._store.conflicts(),
            refused_by=self._store.refused_by.all(),
        )
        if reasons:
            raise ReservationsError(
                f"all {self._rounds} rounds are done, with reservations: {'; '.join(reasons)}. "
                f"{self._store.root / 'history.jsonl'} has the details"
            )

    def _late(self) -> tuple[int, ...]:
        """Those who have not said that they have everything, and may still come for it."""
        collected_by = self._exchange.collected_by
        late = [j for j in self._barrier.waited_for_at_the_end if collected_by[j] < self._rounds]
        # Who had everything once and has lost it since is there to say so.
        return tuple(j for j in late if j not in self._exchange.served or j in self._barrier.state.connected)


async def let_find_out(status: Status, greeted: Mapping[int, int], peer: int | None) -> None:
    """Serve on for a moment, so that the peer that disagrees ends with the same sentence, and waits for nobody.

    It watches this one if the data differ, and asks twice if the settings do.

    Args:
        greeted: how often each peer has said hello.
    """
    deadline = time.monotonic() + _FAREWELL
    while peer is not None and time.monotonic() < deadline:
        if status.is_followed_by(peer) or greeted.get(peer, 0) > 1:
            break
        await asyncio.sleep(0.05)
