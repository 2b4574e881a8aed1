"""All interleavings of a few peers: abstract disks, links and learners around real barriers.

What takes time is a step of its own, and the steps of all peers come in every order: the answers to the barrier's
decisions (a manifest, a snapshot, a teacher run), the commit of a round, its showing to the others, a deadline that
passes, a crash. A crash loses everything that is not a committed round. News travels at once, but the fetch that it
causes may take as long as it likes; a peer that takes no step is a peer that is down or cut off.

Time is abstract: a barrier's clock shows 0, and a deadline passes by showing it infinity for a moment.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from crad_p2p.participation import Part, drawn_schedule
from peer.barrier import Barrier, Quorum
from peer.deadlines import RoundTimes
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
    Gone,
    LearnerUp,
    MakeInitialModel,
    ManifestHeld,
    OpenRound,
    Published,
    Rejoin,
    Release,
    SnapshotHeld,
    Taught,
    Teach,
    Tick,
    Train,
)


@dataclass(frozen=True)
class Show:
    """Left to do: let the others see the round that is committed."""

    round: int


@dataclass(frozen=True)
class Commit:
    """Left to do: make durable the round that is already visible (only in a world that does it the wrong way round)."""

    round: int


@dataclass(frozen=True)
class GiveBack:
    """Left to do: fetch the own last two rounds back from those who hold them; nothing else is done until then."""

    round: int


class Model(NamedTuple):
    """A round on a disk, and the round in which its weights were trained."""

    round: int
    trained: int


class PeerState(NamedTuple):
    """One peer; ``barrier`` is the number of a barrier state, ``todo`` the decisions that are not carried out yet."""

    barrier: int
    todo: frozenset[Any] = frozenset()
    durable: int = -1
    visible: int = -1
    own: tuple[Model, ...] = ()  # what it keeps, ascending
    crashes_left: int = 0
    rollbacks_left: int = 0

    def has_done_all(self) -> bool:
        return {Finish(), Release()} <= self.todo


#: The numbers of the peers' states.
World = tuple[int, ...]


class ViolationError(Exception):
    """An invariant does not hold."""


@dataclass
class ModelChecker:
    """Explores every world that can be reached.

    Attributes:
        crashes: by peer.
        rollbacks: by peer: crashes after which its disk has lost its last round.
        barrier: the class under test.
        keeps: how many of its last rounds a peer keeps.
        teaching: those from whom the others learn; of everybody else they wait for manifests only.
        shows_first: rounds become visible before they are durable.
        guarded: a peer that has lost a round which another holds does nothing until it has been given it back.
        active: peers that take part in a round, drawn by ``draw``; None for all.
        measured: whether it is seen to that no round begins before the one before it is over.
        brief: the world begins after round 0; teachers run at once, and a round is visible as soon as it is durable.
    """

    peers: int = 3
    rounds: int = 2
    crashes: tuple[int, ...] = (1, 1, 1)
    rollbacks: tuple[int, ...] = (0, 0, 0)
    quorum: Quorum | None = None
    barrier: Callable[..., Barrier] = Barrier
    keeps: int = 2
    teaching: tuple[int, ...] = (0, 1, 2)
    shows_first: bool = False
    guarded: bool = True
    brief: bool = False
    active: int | None = None
    draw: int = 0
    measured: bool = True
    _states: list[PeerState] = field(default_factory=list, repr=False)
    _state_numbers: dict[PeerState, int] = field(default_factory=dict, repr=False)
    _barriers: list[Barrier] = field(default_factory=list, repr=False)
    _barrier_numbers: dict[Hashable, int] = field(default_factory=dict, repr=False)
    _told: dict[tuple[int, Event], int] = field(default_factory=dict, repr=False)

    def run(self) -> int:
        """Visit all worlds; returns their number.

        Raises:
            ViolationError: a broken invariant, or a world from which the peers cannot all finish; with the steps
                that lead there.
        """
        worlds = [self._first()]
        numbers = {worlds[0]: 0}
        cameby: list[tuple[int, Any]] = [(0, None)]
        origins: dict[int, list[tuple[int, int | None]]] = defaultdict(list)  # from where, by whose step; no faults
        try:
            for number, world in enumerate(worlds):  # grows meanwhile
                for actor, step, is_fault, after in self._next(world):
                    found = numbers.get(after)
                    if found is None:
                        found = numbers[after] = len(worlds)
                        worlds.append(after)
                        cameby.append((number, (actor, step)))
                        self._check_distance(after)
                    if not is_fault:
                        origins[found].append((number, actor))
        except ViolationError as error:
            raise ViolationError(f"{error}\n{self._trace(cameby, number)}") from None
        self._check_all_can_finish(worlds, origins, cameby)
        return len(worlds)

    # --- invariants ---

    def _check_distance(self, world: World) -> None:
        durable = [self._states[number].durable for number in world]
        if self.quorum or not self.measured:
            return
        over = max(durable) - 1
        if any(last < self._version(i, over) for i, last in enumerate(durable)):
            raise ViolationError(f"more than one round apart: {durable}")

    def _check_train(self, world: World, i: int, decision: Train) -> None:
        peer = self._states[world[i]]
        last = max(peer.durable, peer.visible)
        following = next(number for number in range(last + 1, self.rounds + 1) if self._has_part(i, number))
        if decision.round != following:
            raise ViolationError(f"{decision} by {peer}")
        named = (*decision.teachers, *decision.quarantined, *decision.missing)
        if tuple(sorted(named)) != self._teachers_of(i, decision.round):
            raise ViolationError(f"{decision} of peer {i} does not name every teacher once")
        if not self.quorum and len(decision.teachers) < len(named):
            raise ViolationError(f"{decision} without all the others")
        if self.quorum:
            durable = [self._states[number].durable for number in world]
            if sum(each >= last for each in durable) <= self.peers / 2:
                raise ViolationError(f"{decision} after {durable}, without a majority")
            weights = self._barriers[peer.barrier].state.chosen or {}
            if any(last - weights[j][1] > self.quorum.max_staleness for j in decision.teachers):
                raise ViolationError(f"{decision} with teachers too old: {weights}")

    def _check_rejoin(self, world: World, peer: PeerState, decision: Rejoin) -> None:
        durable = [self._states[number].durable for number in world]
        if not peer.durable + 2 <= decision.round <= max(durable):
            raise ViolationError(f"{decision} of {peer} after {durable}")

    def _check_all_can_finish(
        self, worlds: list[World], origins: dict[int, list[tuple[int, int | None]]], cameby: list[tuple[int, Any]]
    ) -> None:
        """Once nothing fails any more, all can finish from every world; with a quorum, also without any one of them."""
        for away in range(self.peers) if self.quorum and self.quorum.min < self.peers else [None]:
            needed = [i for i in range(self.peers) if i != away]
            done = [all(self._states[world[i]].has_done_all() for i in needed) for world in worlds]
            stack = [number for number, is_done in enumerate(done) if is_done]
            alive = set(stack)
            while stack:
                for origin, actor in origins[stack.pop()]:
                    if actor != away and origin not in alive:
                        alive.add(origin)
                        stack.append(origin)
            if len(alive) < len(worlds):
                stuck = next(number for number in range(len(worlds)) if number not in alive)
                raise ViolationError(
                    f"{len(worlds) - len(alive)} worlds cannot finish{'' if away is None else f' without {away}'}\n"
                    f"{self._trace(cameby, stuck)}\n{[self._states[each] for each in worlds[stuck]]}"
                )

    @staticmethod
    def _trace(cameby: list[tuple[int, Any]], number: int) -> str:
        steps = []
        while number:
            number, step = cameby[number]
            steps.append("  peer {}: {}".format(*step))
        return "\n".join(reversed(steps))

    # --- steps ---

    def _first(self) -> World:
        start = -1
        world = tuple(self._new_peer(i, (), start, self.crashes[i], self.rollbacks[i]) for i in range(self.peers))
        if self.brief:
            for i in range(self.peers):
                world = self._carry_out(world, i, MakeInitialModel())
        return world

    def _next(self, world: World) -> Iterator[tuple[int, Any, bool, World]]:
        for i, number in enumerate(world):
            peer = self._states[number]
            for decision in peer.todo:
                if self._is_possible(world, i, decision):
                    yield i, decision, False, self._carry_out(world, i, decision)
            if self.quorum and self._barriers[peer.barrier].wake_at is not None:
                yield i, "deadline", False, self._pass_deadline(world, i)
            if peer.crashes_left:
                yield i, "crash", True, self._crash(world, i)
            if peer.rollbacks_left and len(peer.own) > 1:
                yield i, "rollback", True, self._roll_back(world, i)

    def _is_possible(self, world: World, i: int, decision: Any) -> bool:
        match decision:
            case FetchManifest(j, number) | FetchSnapshot(j, number):
                return number <= self._states[world[j]].visible  # what its owner has lost comes when it is there again
            case Train(number):
                return Commit(number - 1) not in self._states[world[i]].todo
            case GiveBack(number):
                return any(self._holds(each, i, number) for each in world)
        return not isinstance(decision, Finish | Release)

    def _carry_out(self, world: World, i: int, decision: Any) -> World:
        peer = self._states[world[i]]
        here = self._number(peer._replace(todo=peer.todo - {decision}))
        match decision:
            case FetchManifest(j, number):
                model = self._fetched(world, j, number, is_manifest=True)
                here = self._tell(here, ManifestHeld(j, number) if model else Gone(j, number))
                snapshot = FetchSnapshot(j, number)
                if self.brief and snapshot in self._states[here].todo:
                    return self._carry_out(self._with(world, i, here), i, snapshot)
            case FetchSnapshot(j, number):
                model = self._fetched(world, j, number)
                here = self._tell(here, SnapshotHeld(j, number, model.trained) if model else Gone(j, number))
            case Teach(j, number):
                here = self._tell(here, Taught(j, number, usable=True))
            case MakeInitialModel():
                return self._made(world, i, here, Model(0, 0))
            case Train(number):
                self._check_train(world, i, decision)
                return self._made(world, i, here, Model(number, number))
            case Rejoin(number):
                self._check_rejoin(world, peer, decision)
                world = self._made(world, i, here, Model(number, peer.own[-1].trained))
                return self._with(world, i, self._tell(world[i], LearnerUp()))
            case Show(number):
                return self._show(world, i, here, number)
            case Commit(number):
                here = self._number(self._states[here]._replace(durable=number))
            case GiveBack(number):
                own = tuple(sorted({*peer.own[-1:], Model(number, number)}))
                return self._restart(world, i, own, peer.crashes_left, peer.rollbacks_left)
        return self._with(world, i, here)

    def _fetched(self, world: World, j: int, number: int, *, is_manifest: bool = False) -> Model | None:
        """What a peer answers that is asked for one of its rounds; None if it has deleted it."""
        owner = self._states[world[j]]
        model = next((each for each in owner.own if each.round == number), None)
        if model is None and is_manifest and self.active is not None:
            return Model(number, number)  # those are kept for ever
        if model is None and not self.quorum:
            raise ViolationError(f"round {number} is needed of a peer that keeps {self.keeps}: {owner}")
        return model

    def _made(self, world: World, i: int, here: int, model: Model) -> World:
        """A round is ready to be published."""
        peer = self._states[here]
        peer = peer._replace(own=(*peer.own, model)[-self.keeps :])
        if self.shows_first:
            peer = peer._replace(todo=peer.todo | {Commit(model.round)})
            return self._show(world, i, self._number(peer), model.round)
        peer = peer._replace(durable=model.round)
        if self.brief:
            return self._show(world, i, self._number(peer), model.round)
        return self._with(world, i, self._number(peer._replace(todo=peer.todo | {Show(model.round)})))

    def _show(self, world: World, i: int, here: int, number: int) -> World:
        peer = self._states[here]
        # Fetches of the round before are given up; what is still wanted, the barrier asks for again.
        todo = frozenset(
            each
            for each in peer.todo
            if not isinstance(each, FetchManifest | FetchSnapshot)
            or (self.active is not None and each.round == self._version(each.peer, number))
        )
        here = self._tell(self._number(peer._replace(visible=number, todo=todo)), Published(number))
        return self._announce(self._with(world, i, here), i)

    def _pass_deadline(self, world: World, i: int) -> World:
        return self._with(world, i, self._tell(self._tell(world[i], Tick(math.inf)), Tick(0.0)))

    def _crash(self, world: World, i: int) -> World:
        """A peer ends anywhere, and is there again with nothing but its committed rounds."""
        peer = self._states[world[i]]
        if any(isinstance(each, GiveBack) for each in peer.todo):
            return self._with(world, i, self._number(peer._replace(crashes_left=peer.crashes_left - 1)))
        own = tuple(model for model in peer.own if model.round <= peer.durable)
        return self._restart(world, i, own, peer.crashes_left - 1, peer.rollbacks_left)

    def _roll_back(self, world: World, i: int) -> World:
        peer = self._states[world[i]]
        *own, lost = peer.own
        if self.guarded and any(self._holds(each, i, lost.round) for each in world):
            blocked = PeerState(
                self._new_barrier(i, own[-1].round),
                frozenset({GiveBack(lost.round)}),
                durable=lost.round,  # what counts is what is not lost for good
                own=tuple(own),
                crashes_left=peer.crashes_left,
                rollbacks_left=peer.rollbacks_left - 1,
            )
            return self._with(world, i, self._number(blocked))
        return self._restart(world, i, tuple(own), peer.crashes_left, peer.rollbacks_left - 1)

    def _holds(self, number: int, i: int, lost: int) -> bool:
        """Whether a peer has the snapshot of a round of peer i."""
        peer = self._states[number]
        barrier = self._barriers[peer.barrier]
        return peer.durable > lost or (barrier.published == lost and i in barrier.state.snapshots)

    def _restart(self, world: World, i: int, own: tuple[Model, ...], crashes_left: int, rollbacks_left: int) -> World:
        here = self._new_peer(i, own, own[-1].round if own else -1, crashes_left, rollbacks_left)
        for j, other in enumerate(world):
            if j != i:
                here = self._tell(here, Announced(j, self._states[other].visible))
        return self._announce(self._with(world, i, here), i)

    def _announce(self, world: World, i: int) -> World:
        news = Announced(i, self._states[world[i]].visible)
        return tuple(each if j == i else self._tell(each, news) for j, each in enumerate(world))

    @staticmethod
    def _with(world: World, i: int, here: int) -> World:
        return (*world[:i], here, *world[i + 1 :])

    # --- peers and barriers, numbered: equal ones are one, and each step is taken once ---

    def _new_peer(self, i: int, own: tuple[Model, ...], last: int, crashes_left: int, rollbacks_left: int) -> int:
        state = PeerState(
            self._new_barrier(i, last),
            durable=last,
            visible=last,
            own=own,
            crashes_left=crashes_left,
            rollbacks_left=rollbacks_left,
        )
        return self._tell(self._number(state), LearnerUp())

    def _number(self, peer: PeerState) -> int:
        number = self._state_numbers.setdefault(peer, len(self._states))
        if number == len(self._states):
            self._states.append(peer)
        return number

    def _new_barrier(self, i: int, published: int) -> int:
        others = tuple(j for j in range(self.peers) if j != i)
        new = self.barrier(
            others,
            self.rounds,
            lambda number: self._teachers_of(i, number),
            published,
            quorum=self.quorum,
            part=self._part(i),
            start_wait=1.0,
        )
        return self._number_of(greeted(new))

    def _part(self, i: int) -> Part | None:
        if self.active is None:
            return None
        return Part(drawn_schedule(tuple(range(self.peers)), self.rounds, self.draw, self.active), i)

    def _has_part(self, i: int, number: int) -> bool:
        part = self._part(i)
        return part is None or part.is_active(number)

    def _version(self, i: int, number: int) -> int:
        """The round of what a peer has published once this round is over everywhere."""
        return next((each for each in range(number, -1, -1) if self._has_part(i, each)), -1)

    def _teachers_of(self, i: int, number: int) -> tuple[int, ...]:
        there = [j for j in range(self.peers) if self._has_part(j, number)]
        return tuple(j for j in there if i in there and j != i and j in self.teaching)

    def _number_of(self, barrier: Barrier) -> int:
        number = self._barrier_numbers.setdefault(frozen(state_of(barrier)), len(self._barriers))
        if number == len(self._barriers):
            self._barriers.append(barrier)
        return number

    def _tell(self, number: int, event: Event) -> int:
        """The state of a peer after an event, and after everything that follows at once."""
        key = (number, event)
        if key not in self._told:
            peer = self._states[number]
            if any(isinstance(each, GiveBack) for each in peer.todo):
                return number  # it does not run
            barrier = self._barriers[peer.barrier]
            barrier = copy.deepcopy(barrier, {id(barrier.part): barrier.part})
            todo = set(barrier.step(event))
            while self.brief and (teach := next((each for each in todo if isinstance(each, Teach)), None)):
                todo.remove(teach)
                todo.update(barrier.step(Taught(teach.peer, teach.round, usable=True)))
            todo = {each for each in todo if not isinstance(each, OpenRound | Collected)}
            told = peer._replace(barrier=self._number_of(barrier), todo=peer.todo | todo)
            self._told[key] = self._number(told)
        return self._told[key]


def greeted(barrier: Barrier) -> Barrier:
    """All others have been reached since the start, and are not connected now."""
    for peer in barrier.others:
        for event in (Connected(peer), Disconnected(peer)):
            decisions: list[Decision] = barrier.step(event)
            assert decisions == []
    return barrier


def state_of(barrier: Barrier) -> dict[str, Any]:
    """All that a barrier remembers."""
    return vars(barrier.state)


def frozen(value: Any) -> Hashable:
    """A hashable copy. Neither the order of arrival nor, where time is abstract, its length matters to an invariant."""
    if isinstance(value, dict):
        return frozenset((key, frozen(each)) for key, each in value.items())
    if isinstance(value, RoundTimes):
        return None
    if isinstance(value, list):
        return tuple(value)
    return frozenset(value) if isinstance(value, set) else value
