"""Barriers with a fault, which the model check and the simulation must find."""

from __future__ import annotations

from peer.barrier import Barrier
from peer.events import Decision, Teach


class HastyBarrier(Barrier):
    """Goes on without the last one."""

    def _pending(self) -> list[int]:
        return super()._pending()[1:]


class SelfishBarrier(Barrier):
    """With partial participation: waits for those alone that teach it, and runs ahead of all others."""

    def _pending(self) -> list[int]:
        return [j for j in super()._pending() if self._is_needed(j)]


class DeafBarrier(Barrier):
    """The manifest of one peer is not waited for."""

    def _decide(self) -> list[Decision]:
        if self.published >= 0:
            self.state.manifests.add(self.others[0])
        return super()._decide()


class ForgetfulBarrier(Barrier):
    """A snapshot that comes while the learner runs another is never given to it."""

    def _learner_work(self) -> list[Decision]:
        busy = len(self.state.given) > len(self.state.taught)
        return [each for each in super()._learner_work() if not (busy and isinstance(each, Teach))]


class CreditingBarrier(Barrier):
    """Whoever has said anything counts as present."""

    def _is_present(self, j: int) -> bool:
        return self.state.announced[j] >= 0


class LeapingBarrier(Barrier):
    """Rejoins at a round of which it has seen nothing."""

    def _hear(self, peer: int, number: int, busy: float) -> None:
        super()._hear(peer, number, busy)
        if number == self.published + 1 < self.rounds:
            self.state.ahead[peer] = number + 1

    def _round_of_the_mesh(self) -> int:
        return max(self.state.ahead.values(), default=-1)


class PatientBarrier(Barrier):
    """Waits for everybody, whatever the time."""

    def _is_time_to_choose(self) -> bool:
        return not self._pending()


class LenientBarrier(Barrier):
    """Anything old may teach."""

    def _is_fresh_enough(self, _j: int, model_round: int) -> bool:
        return model_round >= 0


class HurriedBarrier(Barrier):
    """Rejoins before it has met those who would know that its disk has lost a round."""

    def _decide(self) -> list[Decision]:
        greeted, s = self.state.greeted, self.state
        s.greeted = {*self.others} if self._is_left_behind() else greeted
        decisions = super()._decide()
        s.greeted = greeted
        return decisions

    def _round_of_the_mesh(self) -> int:
        return max(self.state.ahead.values(), default=-1)


class FickleBarrier(Barrier):
    """Changes its mind about a teacher when something newer comes."""

    def _take_snapshot(self, peer: int, number: int, model_round: int) -> None:
        super()._take_snapshot(peer, number, model_round)
        s = self.state
        if s.chosen and peer in s.chosen:
            s.chosen[peer] = s.newest.get(peer, s.chosen[peer])
