"""What must hold in a mesh of peers, whatever fails; written down without a look at how the barrier works."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from crad_p2p.participation import Part, Schedule, drawn_schedule
from peer.barrier import Barrier, Quorum
from peer.events import Train


class BrokenLawError(AssertionError):
    """Something has happened that must never happen."""


@dataclass(frozen=True)
class Snapshot:
    """A published round: ``trained`` is the round in which its weights were trained, ``busy`` how long that took."""

    round: int
    trained: int
    digest: str
    busy: float = field(default=0.0, compare=False)


@dataclass(frozen=True)
class Plan:
    """What all peers of a mesh agree on.

    Attributes:
        active: peers that take part in a round, drawn by ``draw``; None for all.
        teaching: who teaches in a round; everybody where it says nothing.
        unfit: (peer, round) of snapshots that every service refuses.
        unusable: (peer, round) of snapshots that every learner refuses.
        barrier: the class under test.
    """

    peers: int
    rounds: int
    quorum: Quorum | None = None
    start_wait: float = 60.0
    active: int | None = None
    draw: int = 0
    teaching: Mapping[int, frozenset[int]] = field(default_factory=dict)
    unfit: frozenset[tuple[int, int]] = frozenset()
    unusable: frozenset[tuple[int, int]] = frozenset()
    barrier: Callable[..., Barrier] = Barrier

    @property
    def least(self) -> int:
        """Peers without which nobody may go on; more than half, whatever the settings say."""
        return max(self.quorum.min, self.peers // 2 + 1) if self.quorum else self.peers

    def others(self, me: int) -> tuple[int, ...]:
        return tuple(j for j in range(self.peers) if j != me)

    @property
    def schedule(self) -> Schedule | None:
        return (
            None
            if self.active is None
            else drawn_schedule(tuple(range(self.peers)), self.rounds, self.draw, self.active)
        )

    def takes_part(self, i: int, number: int) -> bool:
        return self.schedule is None or self.schedule.takes_part(i, number)

    def version(self, i: int, number: int) -> int:
        """The round of what a peer has published once this round is over everywhere."""
        return next(each for each in range(number, -1, -1) if self.takes_part(i, each)) if number >= 0 else -1

    def following(self, i: int, number: int) -> int | None:
        """The next round that a peer trains."""
        return next((each for each in range(number + 1, self.rounds + 1) if self.takes_part(i, each)), None)

    def teachers_of(self, me: int, number: int) -> tuple[int, ...]:
        if not self.takes_part(me, number):
            return ()
        teaching = self.teaching.get(number, range(self.peers))
        return tuple(j for j in self.others(me) if j in teaching and self.takes_part(j, number))

    def new_barrier(self, me: int, published: int, now: float) -> Barrier:
        return self.barrier(
            self.others(me),
            self.rounds,
            lambda number: self.teachers_of(me, number),
            published,
            quorum=self.quorum,
            part=None if self.schedule is None else Part(self.schedule, me),
            now=now,
            start_wait=self.start_wait,
        )

    def undisturbed(self) -> dict[tuple[int, int], str]:
        """The digest of every round of every peer, if nothing ever fails and nobody is missing."""
        digests = {(i, 0): trained(i, 0, "", {}) for i in range(self.peers)}
        refused = self.unfit | self.unusable
        for number in range(1, self.rounds + 1):
            for i in (i for i in range(self.peers) if self.takes_part(i, number)):
                newest = {j: (j, self.version(j, number - 1)) for j in self.teachers_of(i, number)}
                taught = {j: digests[key] for j, key in newest.items() if key not in refused}
                digests[i, number] = trained(i, number, digests[i, self.version(i, number - 1)], taught)
        return digests


def trained(peer: int, number: int, last: str, teachers: Mapping[int, str]) -> str:
    """Stands for the model that a peer makes of its last one and its teachers."""
    return hashlib.sha256(repr((peer, number, last, sorted(teachers.items()))).encode()).hexdigest()[:16]


@dataclass
class Laws:
    """Watches a mesh from outside.

    Attributes:
        published: every round that was ever committed.
        durable: the last round on each peer's disk.
    """

    plan: Plan
    published: dict[tuple[int, int], Snapshot] = field(default_factory=dict)
    durable: list[int] = field(default_factory=list)
    _limits: dict[int, int] = field(default_factory=dict)  # for peers in parts without a quorum

    def __post_init__(self) -> None:
        self.durable = [-1] * self.plan.peers

    def committed(self, peer: int, snapshot: Snapshot) -> None:
        """A round has become durable."""
        number = snapshot.round
        _require(self.durable[peer] < number <= self.plan.rounds, f"peer {peer} publishes {number}: {self.durable}")
        known = self.published.setdefault((peer, number), snapshot)
        _require(known.digest == snapshot.digest, f"round {number} of peer {peer} has changed")
        if snapshot.trained == number > 0:
            behind = self._have(number - 1)
            _require(behind >= self.plan.least, f"peer {peer} trained round {number} after {self.durable}")
        self.durable[peer] = number
        if self.plan.quorum:
            limit = self._limits.get(peer, self.plan.rounds)
            _require(number <= limit, f"peer {peer}, cut off with too few, publishes round {number} after {limit}")
        else:
            before = self._have(max(self.durable) - 1)
            _require(before == self.plan.peers, f"more than one round apart: {self.durable}")

    def _have(self, number: int) -> int:
        """How many peers have published all that is theirs up to a round."""
        return sum(durable >= self.plan.version(i, number) for i, durable in enumerate(self.durable))

    def trains(self, peer: int, train: Train, consumed: Mapping[int, Snapshot]) -> None:
        """A barrier lets a round be trained with these snapshots, by teacher."""
        quorum, last = self.plan.quorum, self.durable[peer]
        _require(train.round == self.plan.following(peer, last), f"peer {peer} has {last} and decides {train}")
        expected = self.plan.teachers_of(peer, train.round)
        quarantined = [j for j in train.quarantined if j in expected]  # others do not teach yet
        named = (*train.teachers, *quarantined, *train.missing)
        _require(tuple(sorted(named)) == expected, f"peer {peer}: {train} does not name each of {expected} once")
        for part in (train.teachers, train.quarantined, train.missing, train.stale):
            _require(list(part) == sorted(part), f"peer {peer}: {train} is not in order")
        _require(set(consumed) == set(train.teachers), f"peer {peer}: {train} with {consumed}")
        for j, snapshot in consumed.items():
            _require(self.published.get((j, snapshot.round)) == snapshot, f"peer {j} never published {snapshot}")
            age = self.plan.version(j, train.round - 1) - snapshot.trained
            _require(
                0 <= age <= (quorum.max_staleness if quorum else 0), f"peer {peer}: {train} with {snapshot} of {j}"
            )
        due = {j: self.plan.version(j, train.round - 1) for j in consumed}
        stale = tuple((j, each.round) for j, each in sorted(consumed.items()) if each.trained < due[j])
        _require(train.stale == stale, f"peer {peer}: {train}, but stale are {stale}")
        refused = self.plan.unfit | self.plan.unusable
        bad = [j for j, snapshot in consumed.items() if (j, snapshot.round) in refused]
        _require(not bad, f"peer {peer}: {train} with refused snapshots of {bad}")
        if not quorum:
            _require(not train.missing, f"peer {peer}: {train} under policy all")
        present = self._have(train.round - 1)
        _require(present >= self.plan.least, f"peer {peer}: {train} after {self.durable}")

    def rejoins(self, peer: int, number: int, manifests: Iterable[tuple[int, int]]) -> None:
        """A barrier publishes its last model again as another round; these manifests it has seen."""
        _require(self.plan.quorum is not None, f"peer {peer} rejoins under policy all")
        _require(number >= self.durable[peer] + 2, f"peer {peer} has {self.durable[peer]} and rejoins at {number}")
        seen = any(r == number and j != peer and (j, r) in self.published for j, r in manifests)
        _require(seen, f"peer {peer} rejoins at {number} without having seen it")

    def asked_for_a_lost_round(self, peer: int, owner: int, number: int) -> None:
        """A peer asks another for a round that it has deleted."""
        _require(self.plan.quorum is not None, f"round {number} of peer {owner}, needed by {peer}, was deleted")

    def divided(self, parts: Iterable[frozenset[int]]) -> None:
        """The network has changed: within a part everybody can reach everybody, if not always directly."""
        if not self.plan.quorum:
            return
        before, self._limits = self._limits, {}
        for part in parts:
            if len(part) < self.plan.least:
                limit = max(before.get(i, max(self.durable) + 1) for i in part)
                self._limits |= dict.fromkeys(part, limit)

    def lost(self, peer: int, number: int) -> None:
        """What a peer published after this round is lost everywhere, as if it had never been."""
        self.durable[peer] = number


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise BrokenLawError(otherwise)
