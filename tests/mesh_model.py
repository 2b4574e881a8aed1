"""A mesh in a made world: real barriers between links, disks, learners and processes that take time and fail.

Nothing here draws lots, and nothing knows how long anything takes: a :class:`Scheduler` says when each pending step
happens, in any order. What it may do to the mesh (crash, cut, pause, …) are methods of :class:`Mesh`. The laws
(``mesh_laws``) are checked at every commit and every decision.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from mesh_laws import Laws, Plan, Snapshot, trained

from peer.events import (
    Announced,
    Collected,
    Connected,
    Decision,
    Disconnected,
    Event,
    FetchManifest,
    FetchSnapshot,
    Finish,
    GiveUp,
    Gone,
    LearnerDown,
    LearnerUp,
    MakeInitialModel,
    ManifestHeld,
    Published,
    Rejoin,
    Release,
    SnapshotHeld,
    SnapshotRefused,
    Taught,
    Teach,
    Tick,
    Train,
)

Action = Callable[[], None]
#: What waits in a service's inbox; it may turn out to mean nothing to the barrier any more.
Item = Callable[[], Event | None]


class Scheduler(Protocol):
    """When things happen."""

    def after(self, peer: int, what: str, action: Action) -> None:
        """A step of this kind has begun at a peer; ``action`` is its end."""

    def wake(self, peer: int, local: float, action: Action) -> None:
        """``action`` is due when a peer's clock shows this time."""

    def clock(self, peer: int) -> float:
        """What a peer's clock shows."""

    def copies(self) -> int:
        """How often a piece of news arrives. Lost news comes again with the next heartbeat."""


@dataclass
class Disk:
    """What a peer keeps, whatever happens to its processes."""

    own: dict[int, Snapshot] = field(default_factory=dict)
    manifests: set[tuple[int, int]] = field(default_factory=set)
    received: dict[int, dict[int, Snapshot]] = field(default_factory=dict)  # by peer and round
    parts: dict[tuple[int, int], int] = field(default_factory=dict)  # pieces of snapshots that are not whole yet
    refused: set[tuple[int, int]] = field(default_factory=set)
    is_full: bool = False

    @property
    def last(self) -> int:
        return max(self.own, default=-1)

    def prune(self, plan: Plan) -> None:
        """Keep P and P-1; of others also what may have to teach later."""
        if plan.active is not None:  # the last two that there are, of each
            for held in (self.own, *self.received.values()):
                for number in sorted(held)[:-2]:
                    del held[number]
            return
        kept = self.last - 1
        self.own = {number: each for number, each in self.own.items() if number >= kept}
        for held in self.received.values():
            for number in [number for number in held if number < min(kept, max(held))]:
                del held[number]


class Service:
    """One start of one peer's service, with its learner: carries the decisions of its barrier out."""

    def __init__(self, mesh: Mesh, me: int) -> None:
        self.mesh, self.me, self.plan = mesh, me, mesh.plan
        self.disk = mesh.disks[me]
        self.start = next(mesh.starts)
        self.now = mesh.scheduler.clock(me)
        self.first = (self.disk.last, self.now)  # with what its barrier began
        self.barrier = self.plan.new_barrier(me, *self.first)
        self.visible = self.disk.last
        self.busy = 0.0  # of the visible round
        self.collected = -1
        self.connected: dict[int, int] = {}  # to which start of the other's service
        self.collected_by = dict.fromkeys(self.barrier.others, -1)
        self.learner = 0  # counts its processes, and what it was told to forget
        self.done = False
        self.inbox: deque[Item] = deque()
        self.is_committing = False
        self.recording: list[Event] = []
        self.decisions: list[Decision] = []
        self._met: set[int] = set()
        self._taught: dict[int, int] = {}  # with what the learner was taught, by teacher
        self._parked: list[FetchManifest | FetchSnapshot] = []
        self._asked: set[tuple[int, Decision]] = set()
        self._armed: float | None = None

    def begin(self) -> None:
        """What the disk holds is known at once; the rest takes time."""
        published = self.barrier.published
        if self.plan.active is not None:  # what is here counts as announced, and is not fetched again
            for j in self.barrier.others:
                newest = max((number for owner, number in self.disk.manifests if owner == j), default=-1)
                self.post(lambda j=j, newest=newest: Announced(j, newest))
            self._start_learner()
            return
        for j, number in sorted(self.disk.manifests):
            if published >= 0 and number == published:
                self.post(lambda j=j: ManifestHeld(j, published))
        for j, held in sorted(self.disk.received.items()):
            number = max((number for number in held if number <= published), default=None)
            if number is not None:
                self.post(lambda j=j, number=number, trained=held[number].trained: SnapshotHeld(j, number, trained))
        self._start_learner()

    @property
    def runs(self) -> bool:
        return self.mesh.services[self.me] is self

    def after(self, what: str, action: Action) -> None:
        """``action`` if this process still runs then, and later if it is paused."""

        def end() -> None:
            if not self.runs:
                return
            if self.me in self.mesh.paused:
                self.mesh.paused[self.me].append(end)
            else:
                action()

        self.mesh.scheduler.after(self.me, what, end)

    # --- the pump ---

    def post(self, item: Item) -> None:
        self.inbox.append(item)
        self.pump()

    def pump(self) -> None:
        """Feed the barrier; nothing else is looked at while a round is being committed."""
        while self.inbox and not self.is_committing and self.runs:
            event = self.inbox.popleft()()
            if event is not None:
                self._step(event)
        if self.runs and not self.is_committing:
            self._arm()

    def _step(self, event: Event) -> None:
        self.now = max(self.now, self.mesh.scheduler.clock(self.me))
        if not isinstance(event, Tick):
            self._tell(Tick(self.now))
            if self.is_committing:
                self.inbox.appendleft(lambda: event)
                return
        self._tell(event)

    def _tell(self, event: Event) -> None:
        if isinstance(event, Connected):
            self._met.add(event.peer)
        self.recording.append(event)
        decisions = self.barrier.step(event)
        self.decisions += decisions
        for decision in decisions:
            self._carry_out(decision)
        if self.runs:
            self._leave_if_done()

    def _arm(self) -> None:
        """Wake up when the barrier wants to know the time, and never else."""
        due = self.barrier.wake_at
        if due == self._armed:
            return
        self._armed = due
        if due is not None:

            def ring(due: float = due) -> None:
                if self.runs and self._armed == due:
                    self._armed = None
                    self.now = max(self.now, due)
                    self.post(lambda: Tick(self.now))

            def unless_paused() -> None:
                if self.me in self.mesh.paused:
                    self.mesh.paused[self.me].append(ring)
                else:
                    ring()

            self.mesh.scheduler.wake(self.me, due, unless_paused)

    def _carry_out(self, decision: Decision) -> None:
        match decision:
            case FetchManifest() | FetchSnapshot():
                once = (self.barrier.published, decision)
                assert once not in self._asked, f"peer {self.me} asks twice: {decision}"
                self._asked.add(once)
                self.after("ask", lambda: self._fetch(decision))
            case MakeInitialModel():
                self._train(Snapshot(0, 0, trained(self.me, 0, "", {})))
            case Teach(j, number):
                assert number in self.disk.received[j], f"peer {self.me} is taught {decision} without the file"
                usable = (j, number) not in self.plan.unusable
                self._taught[j] = number
                self._learner_will("teach", lambda: Taught(j, number, usable))
            case Train(number, teachers, _quarantined, _missing, stale):
                self._require_met(decision)
                rounds = dict(stale)
                due = {j: self.plan.version(j, number - 1) for j in teachers}
                consumed = {j: self.disk.received[j][rounds.get(j, due[j])] for j in teachers}
                for j, snapshot in consumed.items():
                    assert self._taught[j] == snapshot.round, f"peer {self.me}: {decision} after {self._taught}"
                self.mesh.laws.trains(self.me, decision, consumed)
                digests = {j: each.digest for j, each in consumed.items()}
                last = self.disk.own[self.plan.version(self.me, number - 1)].digest
                self._train(Snapshot(number, number, trained(self.me, number, last, digests)))
            case Collected(number):
                if number < self.plan.rounds:
                    self.collected = number
            case Release():
                self.collected = self.plan.rounds
                self.mesh.spread(self.me)
                self._leave_if_done()
            case Rejoin(number):
                self._require_met(decision)
                self.mesh.laws.rejoins(self.me, number, self.disk.manifests)
                last = self.disk.own[self.disk.last]
                self._commit(Snapshot(number, last.trained, last.digest))
            case Finish():
                self._learner_will("evaluate", self._finish)
            case GiveUp(missing):
                assert self.barrier.published <= 0
                assert set(missing) == {*self.barrier.others} - self._met
                assert not self._has_met_enough(), f"peer {self.me} gives up and has met {self._met}"
                self.mesh.crash(self.me)
                self.mesh.scheduler.after(self.me, "started again", lambda: self.mesh.boot(self.me))

    def _require_met(self, decision: Decision) -> None:
        """Those who would know if this disk has lost a round have been met before anything is published."""
        assert self._has_met_enough(), f"peer {self.me} decides {decision} and has met only {self._met}"

    def _has_met_enough(self) -> bool:
        return 1 + len(self._met) >= self.plan.least

    # --- learner and disk ---

    def _start_learner(self) -> None:
        self.learner += 1
        self._taught = {}
        self._learner_will("learner starts", lambda: LearnerUp(), holds_last_round=True)

    def _learner_will(self, what: str, item: Item, *, holds_last_round: bool = False) -> None:
        """The learner works; what it says counts unless it ends before."""
        learner, number = self.learner, self._model_round()

        def said() -> Event | None:
            if learner != self.learner:
                return None
            if holds_last_round and number != self._model_round():
                self._start_learner()  # a round has been committed meanwhile: it is given that one
                return None
            return item()

        self.after(what, lambda: self.post(said))

    def _model_round(self) -> int:
        return self.plan.version(self.me, self.barrier.published)

    def _train(self, snapshot: Snapshot) -> None:
        since = self.now

        def finished() -> None:
            busy = max(self.now, self.mesh.scheduler.clock(self.me)) - since
            self._commit(Snapshot(snapshot.round, snapshot.trained, snapshot.digest, busy))

        self._learner_will("train", finished)

    def lose_learner(self) -> None:
        self.learner += 1
        ended = self.learner
        self.post(LearnerDown)
        self.after("learner ends", lambda: self._start_learner() if self.learner == ended else None)

    def _commit(self, snapshot: Snapshot) -> None:
        self.is_committing = True
        self.after("commit", lambda: self._rename(snapshot))

    def _rename(self, snapshot: Snapshot) -> None:
        """The commit point."""
        if self.disk.is_full:
            self.mesh.crash(self.me)
            return
        self.mesh.laws.committed(self.me, snapshot)
        self.disk.own[snapshot.round] = snapshot
        self.after("show", lambda: self._show(snapshot))

    def _show(self, snapshot: Snapshot) -> None:
        rejoined = snapshot.round != self.barrier.published + 1
        self.disk.prune(self.plan)
        self.visible, self.busy, self.is_committing = snapshot.round, snapshot.busy, False
        self._step(Published(snapshot.round, snapshot.busy))
        if rejoined:
            self._start_learner()
        self.mesh.spread(self.me)
        self.pump()

    def _finish(self) -> None:
        self.done = True
        self._leave_if_done()

    def _leave_if_done(self) -> None:
        waited_for = self.barrier.waited_for_at_the_end
        if (
            self.done
            and self.collected == self.plan.rounds
            and all(self.collected_by[j] >= self.plan.rounds for j in waited_for)
        ):
            self.mesh.leave(self.me)

    # --- other peers ---

    def meet(self, j: int, start: int) -> None:
        self.connected[j] = start
        self.post(lambda: Connected(j))

    def part(self, j: int) -> None:
        del self.connected[j]
        self.post(lambda: Disconnected(j))

    def hear(self, j: int, start: int, number: int, busy: float, collected: int) -> None:
        """News of a peer; it may be older than what is known."""
        if self.connected.get(j) != start:
            return
        self.collected_by[j] = max(self.collected_by[j], collected)
        self.post(lambda: Announced(j, number, busy))
        self._retry(j)

    def _retry(self, j: int) -> None:
        again = [decision for decision in self._parked if decision.peer == j]
        self._parked = [decision for decision in self._parked if decision.peer != j]
        for decision in again:
            self.after("ask", lambda decision=decision: self._fetch(decision))

    def _fetch(self, decision: FetchManifest | FetchSnapshot) -> None:
        """Until it is here, or will never be."""
        j, number = decision.peer, decision.round
        if isinstance(decision, FetchManifest) and (j, number) in self.disk.manifests:
            self.post(lambda: ManifestHeld(j, number))
            return
        if isinstance(decision, FetchSnapshot) and number in self.disk.received.get(j, {}):
            held = self.disk.received[j][number]
            self.post(lambda: SnapshotHeld(j, number, held.trained))
            return
        if isinstance(decision, FetchSnapshot) and (j, number) in self.disk.refused:
            self.post(lambda: SnapshotRefused(j, number))
            return
        other = self.mesh.reached(self.me, j)
        if other is None or other.visible < number:
            self._parked.append(decision)
            return
        snapshot = other.disk.own.get(number)
        if isinstance(decision, FetchManifest) and self.plan.active is not None:  # those are kept for ever
            self.disk.manifests.add((j, number))
            self.post(lambda: ManifestHeld(j, number))
        elif snapshot is None:
            self.mesh.laws.asked_for_a_lost_round(self.me, j, number)
            self.post(lambda: Gone(j, number))
        elif isinstance(decision, FetchManifest):
            self.disk.manifests.add((j, number))
            self.post(lambda: ManifestHeld(j, number))
        else:
            self.after("transfer", lambda: self._receive(decision, other, snapshot))

    def _receive(self, decision: FetchSnapshot, other: Service, snapshot: Snapshot) -> None:
        """Half of a snapshot has come, if the link has held; what is here is not fetched again."""
        key = (decision.peer, decision.round)
        if self.mesh.reached(self.me, decision.peer) is other:
            self.disk.parts[key] = self.disk.parts.get(key, 0) + 1
        if self.disk.parts.get(key, 0) < 2:
            self._fetch(decision)
        elif key in self.plan.unfit:
            self.disk.refused.add(key)
            self.post(lambda: SnapshotRefused(*key))
        else:
            del self.disk.parts[key]
            self.disk.received.setdefault(decision.peer, {})[decision.round] = snapshot
            self._fetch(decision)


class Mesh:
    """All peers, and everything that may happen to them."""

    def __init__(self, plan: Plan, scheduler: Scheduler) -> None:
        self.plan, self.scheduler = plan, scheduler
        self.laws = Laws(plan)
        self.starts = itertools.count()
        self.disks = [Disk() for _ in range(plan.peers)]
        self.services: list[Service | None] = [None] * plan.peers
        self.all_services: list[Service] = []
        self.paused: dict[int, list[Action]] = {}
        self.cuts: set[tuple[int, int]] = set()  # from whom to whom nothing gets through
        self.left: set[int] = set()
        self.deserted: set[int] = set()  # away when somebody left, and not done yet
        self.finished: set[int] = set()

    # --- what may happen ---

    def boot(self, i: int) -> None:
        if self.services[i] is None and i not in self.left:
            service = self.services[i] = Service(self, i)
            self.all_services.append(service)
            service.begin()
            self._recheck(i)

    def crash(self, i: int) -> None:
        """The end of service and learner: all that is not on the disk is lost."""
        if self.services[i] is not None:
            self.services[i] = None
            self.paused.pop(i, None)
            self._recheck(i)

    def leave(self, i: int) -> None:
        """All is done; the peer ends by itself, and will not be back."""
        service = self.services[i]
        assert service is not None
        if i not in self.left:
            self.left.add(i)
            self.finished.add(i)
            self.deserted |= {j for j, number in service.collected_by.items() if number < self.plan.rounds}
            for j in self.plan.others(i):
                if (other := self.services[j]) is not None and i in other.connected:
                    other.post(lambda i=i: Gone(i, self.plan.version(i, self.plan.rounds)))
            self.crash(i)

    def pause(self, i: int) -> None:
        if self.services[i] is not None:
            self.paused.setdefault(i, [])

    def resume(self, i: int) -> None:
        for action in self.paused.pop(i, []):
            action()
        self._recheck(i)

    def cut(self, *links: tuple[int, int]) -> None:
        self.cuts.update(links)
        self._network_changed(links)

    def mend(self, *links: tuple[int, int]) -> None:
        self.cuts.difference_update(links)
        self._network_changed(links)

    def roll_back(self, i: int) -> None:
        """The disk of a peer that is down is put back to what it was one round ago."""
        assert self.services[i] is None
        number, published = self.disks[i].last - 1, self.laws.published
        self.disks[i] = Disk({r: published[i, r] for r in (number - 1, number) if (i, r) in published})
        if not self.holders_of_lost(i):
            self.laws.lost(i, number)

    def give_back(self, i: int) -> None:
        """A peer that is down fetches its own last two rounds back from those who hold them."""
        assert self.services[i] is None
        disk = self.disks[i]
        for holder in self.holders_of_lost(i):
            disk.own |= self.disks[holder].received[i]
        disk.prune(self.plan)

    def holders_of_lost(self, i: int) -> list[int]:
        """Who holds a round of peer i that it has lost."""
        return [j for j in self.plan.others(i) if self.remembers_more(j, i)]

    def heartbeat(self) -> None:
        """Everybody looks at all links."""
        for i in range(self.plan.peers):
            self._recheck(i)

    def remembers_more(self, i: int, j: int) -> bool:
        """Whether peer i holds a round of j that j has lost."""
        return max(self.disks[i].received.get(j, {}), default=-1) > self.disks[j].last

    # --- links ---

    def is_open(self, i: int, j: int) -> bool:
        return (i, j) not in self.cuts and (j, i) not in self.cuts

    def reached(self, i: int, j: int) -> Service | None:
        """The service of j, if that of i has a link to it and it would answer now."""
        here, there = self.services[i], self.services[j]
        if here is None or there is None or not self.is_open(i, j) or j in self.paused:
            return None
        return there if here.connected.get(j) == there.start else None

    def spread(self, j: int) -> None:
        """Tell everybody what j has published."""
        for i in self.plan.others(j):
            self._send_news(j, i)

    def check_link(self, i: int, j: int) -> None:
        """Peer i notices whether it can reach j; a heartbeat, if it can."""
        here, there = self.services[i], self.services[j]
        if here is None:
            return
        up = there is not None and self.is_open(i, j)
        if j in here.connected and (not up or here.connected[j] != there.start):  # type: ignore[union-attr]
            here.part(j)
        if not up or self.services[i] is not here or self.services[j] is not there:
            return
        if j not in here.connected:
            if self.remembers_more(i, j) or self.remembers_more(j, i):
                return  # refused
            here.meet(j, there.start)  # type: ignore[union-attr]
        self._send_news(j, i)

    def _send_news(self, j: int, i: int) -> None:
        there, here = self.services[j], self.services[i]
        if there is None or here is None or not self.is_open(i, j):
            return
        start, number, busy, collected = there.start, there.visible, there.busy, there.collected

        def arrive() -> None:
            if (j, i) not in self.cuts:
                here.hear(j, start, number, busy, collected)

        copies = self.scheduler.copies()
        for _ in range(copies):
            here.after("news", arrive)
        if not copies:
            here.after("heartbeat", lambda: self.check_link(i, j))

    def _recheck(self, i: int) -> None:
        for j in self.plan.others(i):
            self._recheck_link(i, j)
            self._recheck_link(j, i)

    def _recheck_link(self, i: int, j: int) -> None:
        here = self.services[i]
        if here is not None:
            here.after("notice", lambda: self.check_link(i, j))

    def _network_changed(self, links: tuple[tuple[int, int], ...]) -> None:
        self.laws.divided(self._parts())
        for i, j in links:
            self._recheck_link(i, j)
            self._recheck_link(j, i)

    def _parts(self) -> Iterator[frozenset[int]]:
        left = set(range(self.plan.peers))
        while left:
            part, stack = set[int](), [min(left)]
            while stack:
                i = stack.pop()
                part.add(i)
                stack += [j for j in left - part if self.is_open(i, j)]
            left -= part
            yield frozenset(part)

    # --- afterwards ---

    def is_done(self, i: int) -> bool:
        service = self.services[i]
        return i in self.left or (service is not None and service.done)

    @property
    def late(self) -> list[int]:
        """Who still has something to do; not those who were so long away that the others have left."""
        return [i for i in range(self.plan.peers) if not self.is_done(i) and i not in self.deserted]

    def replay(self) -> None:
        """Every recording, given to a new barrier, leads to the same decisions."""
        for service in self.all_services:
            barrier = self.plan.new_barrier(service.me, *service.first)
            decisions = [decision for event in service.recording for decision in barrier.step(event)]
            assert decisions == service.decisions, f"a recording of peer {service.me} gives other decisions"

    def explain(self) -> str:
        """Where everybody is."""
        lines = []
        for i, service in enumerate(self.services):
            state = "left" if i in self.left else "down" if service is None else service.barrier.explain()
            lines.append(f"  peer {i}: round {self.disks[i].last} on disk; {state}")
        return "\n".join(lines)
