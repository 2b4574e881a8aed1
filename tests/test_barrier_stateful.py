"""Hypothesis looks for a sequence of steps and faults that breaks a law, or after which the peers cannot finish."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from mesh_laws import Plan
from mesh_model import Action, Mesh
from planted_faults import CreditingBarrier, HastyBarrier

from peer.barrier import Barrier, Quorum

#: Steps within which peers that nothing disturbs any more must have finished.
_MANY = 20_000


@dataclass
class Steps:
    """A scheduler that never does anything by itself: all steps that have begun, and how to end them."""

    pending: list[tuple[str, int, Action]] = field(default_factory=list)
    now: float = 0.0

    def after(self, peer: int, what: str, action: Action) -> None:
        self.pending.append((what, peer, action))

    def wake(self, peer: int, local: float, action: Action) -> None:
        def ring() -> None:
            self.now = max(self.now, local)
            action()

        self.pending.append(("wake", peer, ring))

    def clock(self, peer: int) -> float:  # noqa: ARG002
        return self.now

    def copies(self) -> int:
        return 1

    def end(self, number: int) -> None:
        *_, action = self.pending.pop(number % len(self.pending))
        self.now += 0.125
        action()

    def end_all(self, mesh: Mesh) -> None:
        """In the order in which they began; time passes only when nothing else is left to do."""
        for _ in range(_MANY):
            if not self.pending or not mesh.late:
                return
            self.end(next((n for n, (what, *_) in enumerate(self.pending) if what != "wake"), 0))
        raise AssertionError("they never come to rest")


class MeshMachine(RuleBasedStateMachine):
    """A mesh of two to four peers; each rule is something that happens to it."""

    barrier = Barrier

    def __init__(self) -> None:
        super().__init__()
        self.steps = Steps()
        self.mesh: Mesh
        self.has_rolled_back = False

    @initialize(
        peers=st.integers(2, 4),
        rounds=st.integers(1, 6),
        staleness=st.none() | st.integers(0, 2),
        silent=st.booleans(),
        calm=st.sampled_from([0, 40, 80, 160]),
        refused=st.sets(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=2),
    )
    def begin(
        self,
        peers: int,
        rounds: int,
        staleness: int | None,
        silent: bool,
        calm: int,
        refused: set[tuple[int, int]],
    ) -> None:
        """So many steps are taken in order before anything fails."""
        quorum = None if staleness is None else Quorum(peers // 2 + 1, staleness, 1.0)
        teaching = {1: frozenset[int]()} if silent else {}
        plan = Plan(
            peers,
            rounds,
            quorum,
            start_wait=30.0,
            teaching=teaching,
            unfit=frozenset(list(refused)[:1]),
            unusable=frozenset(list(refused)[1:]),
            barrier=self.barrier,
        )
        self.mesh = Mesh(plan, self.steps)
        for i in range(peers):
            self.mesh.boot(i)
        for _ in range(calm):
            if self.steps.pending:
                self.steps.end(0)

    # --- what happens ---

    @precondition(lambda self: self.steps.pending)
    @rule(numbers=st.lists(st.integers(0, 60), min_size=5, max_size=60))
    def go_on(self, numbers: list[int]) -> None:
        for number in numbers:
            if self.steps.pending:
                self.steps.end(number)

    @rule(count=st.sampled_from([30, 100, 200]), peer=st.integers(0, 3))
    def go_on_without_one(self, count: int, peer: int) -> None:
        """In order, but for one peer, which is slow; time passes only when there is nothing else to do."""
        slow = self._of(peer)
        for _ in range(count):
            others = [(what == "wake", n) for n, (what, owner, _) in enumerate(self.steps.pending) if owner != slow]
            if others:
                self.steps.end(min(others)[1])

    @rule(peer=st.integers(0, 3))
    def crash_or_restart(self, peer: int) -> None:
        i = self._of(peer)
        self.mesh.boot(i) if self.mesh.services[i] is None else self.mesh.crash(i)

    @rule(peer=st.integers(0, 3))
    def lose_learner(self, peer: int) -> None:
        service = self.mesh.services[self._of(peer)]
        if service is not None and self._of(peer) not in self.mesh.paused:
            service.lose_learner()

    @rule(peer=st.integers(0, 3))
    def pause_or_resume(self, peer: int) -> None:
        i = self._of(peer)
        self.mesh.resume(i) if i in self.mesh.paused else self.mesh.pause(i)

    @rule(one=st.sets(st.integers(0, 3)))
    def partition(self, one: set[int]) -> None:
        peers = range(self.mesh.plan.peers)
        self.mesh.cut(*((i, j) for i in peers for j in peers if (i in one) != (j in one)))

    @rule(peer=st.integers(0, 3), other=st.integers(0, 3))
    def cut_one_way(self, peer: int, other: int) -> None:
        if self._of(peer) != self._of(other):
            self.mesh.cut((self._of(peer), self._of(other)))

    @rule()
    def heal(self) -> None:
        self.mesh.mend(*self.mesh.cuts)

    @rule(number=st.integers(0, 60))
    def lose_or_repeat_news(self, number: int) -> None:
        news = [step for step in self.steps.pending if step[0] == "news"]
        if news and number % 2:
            self.steps.pending.remove(news[number % len(news)])
        elif news:
            self.steps.pending.append(news[number % len(news)])

    @precondition(lambda self: not self.has_rolled_back)
    @rule(peer=st.integers(0, 3))
    def roll_back(self, peer: int) -> None:
        """Once; with a quorum only what so many hold that one of them is met by any who train; and not what nobody
        keeps a copy of: the last round, and what was refused.
        """
        mesh, plan = self.mesh, self.mesh.plan
        for i in (self._of(peer + n) for n in range(plan.peers)):
            last = mesh.disks[i].last
            holders = sum(last in mesh.disks[j].received.get(i, {}) for j in plan.others(i))
            if (
                1 <= last < plan.rounds
                and (i, last) not in plan.unfit
                and (holders > plan.peers - plan.least or not plan.quorum)
            ):
                break
        else:
            return
        self.has_rolled_back = True
        self.mesh.crash(i)
        self.mesh.roll_back(i)
        self.mesh.boot(i)

    @precondition(lambda self: self.has_rolled_back)
    @rule()
    def give_back(self) -> None:
        for i in range(self.mesh.plan.peers):
            if self.mesh.holders_of_lost(i) and i not in self.mesh.left:
                self.mesh.crash(i)
                self.mesh.give_back(i)
                self.mesh.boot(i)

    def _of(self, peer: int) -> int:
        return peer % self.mesh.plan.peers

    # --- what must hold, besides the laws ---

    @invariant()
    def every_peer_can_say_what_it_waits_for(self) -> None:
        if hasattr(self, "mesh"):
            assert "None" not in self.mesh.explain()

    def teardown(self) -> None:
        """Once nothing fails any more, all finish; but for those who were away when the last ones left."""
        if not hasattr(self, "mesh"):
            return
        mesh, peers = self.mesh, range(self.mesh.plan.peers)
        self.heal()
        for i in peers:
            mesh.resume(i)
            mesh.boot(i)
        self.give_back()
        mesh.heartbeat()
        self.steps.end_all(mesh)
        assert not mesh.late, f"{mesh.late} never finish\n{mesh.explain()}"
        if mesh.plan.quorum is None:
            digests = {key: snapshot.digest for key, snapshot in mesh.laws.published.items()}
            assert digests == mesh.plan.undisturbed()
        mesh.replay()


SETTINGS = settings(
    max_examples=200,
    stateful_step_count=40,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)


def test_no_sequence_of_faults_breaks_a_law() -> None:
    run_state_machine_as_test(MeshMachine, settings=SETTINGS)


@pytest.mark.parametrize("fault", [HastyBarrier, CreditingBarrier])
def test_planted_faults_are_found(fault: type[Barrier]) -> None:
    machine = type("Faulty", (MeshMachine,), {"barrier": fault})
    found = settings(SETTINGS, database=None, phases=[Phase.generate], report_multiple_bugs=False, max_examples=500)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(machine, settings=found)
