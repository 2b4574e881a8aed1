"""When a round opens: a state machine without clock, socket, file or randomness.

Events go in, decisions come out, and equal events give equal decisions. With P the highest round this peer has durably
published, the rule of policy ``all`` is: train round P+1 only with the round-P snapshot of every other peer. It
follows that no two peers are ever more than one round apart, and that nobody needs a round older than another's P-1.

Rounds in which nobody teaches (method ``local``, warm-up) wait for the manifests of round P all the same, so the rule
about distance holds for every method and all peers can choose the same best round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

# --- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Connected:
    """The link to a peer is up."""

    peer: int


@dataclass(frozen=True)
class Disconnected:
    """The link to a peer is down."""

    peer: int


@dataclass(frozen=True)
class Announced:
    """A peer says that it has published this round."""

    peer: int
    round: int


@dataclass(frozen=True)
class ManifestHeld:
    """A peer's manifest of a round is here and has been checked."""

    peer: int
    round: int


@dataclass(frozen=True)
class SnapshotHeld:
    """A peer's snapshot of a round is here and has been checked."""

    peer: int
    round: int


@dataclass(frozen=True)
class SnapshotRefused:
    """A peer's snapshot of a round is what its manifest announces, and must not be used."""

    peer: int
    round: int


@dataclass(frozen=True)
class LearnerUp:
    """A learner process is ready and holds the model of the last published round; it remembers no teacher."""


@dataclass(frozen=True)
class LearnerDown:
    """The learner process has ended; what it had not finished is lost."""


@dataclass(frozen=True)
class Taught:
    """The learner has the posteriors of a peer's snapshot of ``round``, or refused it (``usable`` false)."""

    peer: int
    round: int
    usable: bool


@dataclass(frozen=True)
class Published:
    """This peer's round is committed: the rename has happened."""

    round: int


Event = (
    Connected
    | Disconnected
    | Announced
    | ManifestHeld
    | SnapshotHeld
    | SnapshotRefused
    | LearnerUp
    | LearnerDown
    | Taught
    | Published
)

# --- decisions --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FetchManifest:
    peer: int
    round: int


@dataclass(frozen=True)
class FetchSnapshot:
    peer: int
    round: int


@dataclass(frozen=True)
class MakeInitialModel:
    """Let the learner make round 0."""


@dataclass(frozen=True)
class OpenRound:
    """Let the learner draw the local epoch of this round."""

    round: int


@dataclass(frozen=True)
class Teach:
    """Let the learner run a peer's snapshot of ``round`` over the open epoch."""

    peer: int
    round: int


@dataclass(frozen=True)
class Collected:
    """The manifests of this round are here from everybody: the best round so far can be decided."""

    round: int


@dataclass(frozen=True)
class Train:
    """The barrier is passed: train this round with these teachers."""

    round: int
    teachers: tuple[int, ...]
    quarantined: tuple[int, ...]


@dataclass(frozen=True)
class Finish:
    """The last round is published here and collected from everybody."""


Decision = FetchManifest | FetchSnapshot | MakeInitialModel | OpenRound | Teach | Collected | Train | Finish

#: Teachers of a round, by its number.
TeachersOf = Callable[[int], tuple[int, ...]]


class Barrier:
    """Policy ``all`` for one peer.

    Args:
        others: ids of all other peers.
        rounds: R, the last round.
        teachers_of: which of the others teach a given round.
        published: the highest round found on disk, -1 for none.
    """

    def __init__(self, others: Iterable[int], rounds: int, teachers_of: TeachersOf, published: int = -1) -> None:
        self.others = tuple(sorted(others))
        self.rounds = rounds
        self.published = published
        self.collected = -1
        self._teachers_of = teachers_of
        self._connected: set[int] = set()
        self._announced = dict.fromkeys(self.others, -1)
        self._learner_up = False
        self._start_round()

    def step(self, event: Event) -> list[Decision]:
        """Take in one event; what is to be done now, in order. Events about past rounds change nothing."""
        match event:
            case Connected(peer):
                self._connected.add(peer)
            case Disconnected(peer):
                self._connected.discard(peer)
            case Announced(peer, number):
                self._announced[peer] = max(number, self._announced[peer])
            case ManifestHeld(peer, number) if number == self.published:
                self._manifests.add(peer)
            case SnapshotHeld(peer, number) if number == self.published:
                self._snapshots[peer] = None
            case SnapshotRefused(peer, number) if number == self.published:
                self._refused.add(peer)
            case LearnerUp():
                self._learner_up = True
            case LearnerDown():
                self._forget_learner()
            case Taught(peer, number, usable) if number == self.published:
                self._taught[peer] = usable
            case Published(number):
                if number != self.published + 1:
                    raise ValueError(f"round {number} published after round {self.published}")
                self.published = number
                self._start_round()
        return self._decide()

    def explain(self) -> str:
        """One sentence: what this peer waits for."""
        if not self._learner_up:
            return "the learner process is starting"
        if self.published < 0:
            return "the initial model is being made"
        unpublished = [peer for peer in self.others if peer not in self._manifests]
        if self.published == self.rounds:
            if unpublished:
                return f"all {self.rounds} rounds are done here; waits for the last round of {self._who(unpublished)}"
            return f"all {self.rounds} rounds are done here and everywhere"
        opening = f"round {self.published + 1}"
        if self._training:
            return f"{opening} is being trained"
        if unpublished:
            return f"{opening} waits for round {self.published} of {self._who(unpublished)}"
        absent = [peer for peer in self._teachers if peer not in self._snapshots and peer not in self._refused]
        if absent:
            return f"{opening} waits for the snapshots of {self._who(absent)}"
        done, teachers = self.teachers_done
        return f"{opening} waits for the learner to run {teachers - done} of {teachers} teachers"

    @property
    def teachers_done(self) -> tuple[int, int]:
        """How many of this round's teachers the learner has run, and how many there are."""
        return len(self._taught), len(self._teachers) - len(self._refused)

    # --- inside ----------------------------------------------------------------------------------------------------

    def _start_round(self) -> None:
        """Forget everything that belonged to the round before."""
        self._teachers = self._teachers_of(self.published + 1) if self.published < self.rounds else ()
        self._manifests: set[int] = set()
        self._snapshots: dict[int, None] = {}  # a set that keeps the order of arrival
        self._refused: set[int] = set()
        self._asked: set[Decision] = set()
        self._reset_learner_work()

    def _forget_learner(self) -> None:
        self._learner_up = False
        self._reset_learner_work()

    def _reset_learner_work(self) -> None:
        self._opened = False
        self._given: set[int] = set()
        self._taught: dict[int, bool] = {}
        self._training = False
        self._finished = False

    def _decide(self) -> list[Decision]:
        if self.published < 0:
            return self._make_initial_model()
        decisions = self._fetches()
        if self.collected < self.published and self._manifests.issuperset(self.others):
            self.collected = self.published
            decisions.append(Collected(self.published))
        if self.published == self.rounds:
            if self.collected == self.rounds and self._learner_up and not self._finished:
                self._finished = True
                decisions.append(Finish())
        elif self._learner_up and not self._training:
            decisions += self._learner_work()
        return decisions

    def _make_initial_model(self) -> list[Decision]:
        if not self._learner_up or self._training:
            return []
        self._training = True
        return [MakeInitialModel()]

    def _fetches(self) -> list[Decision]:
        number = self.published
        wanted: list[Decision] = [FetchManifest(j, number) for j in self.others if self._announced[j] >= number]
        wanted += [FetchSnapshot(j, number) for j in self._teachers if j in self._manifests]
        fresh = [decision for decision in wanted if decision not in self._asked and not self._is_held(decision)]
        self._asked.update(fresh)
        return fresh

    def _is_held(self, decision: Decision) -> bool:
        match decision:
            case FetchManifest(peer, _):
                return peer in self._manifests
            case FetchSnapshot(peer, _):
                return peer in self._snapshots
        return False

    def _learner_work(self) -> list[Decision]:
        work: list[Decision] = []
        if not self._opened:
            self._opened = True
            work.append(OpenRound(self.published + 1))
        for peer in self._snapshots:
            if peer not in self._given:
                self._given.add(peer)
                work.append(Teach(peer, self.published))
        done, teachers = self.teachers_done
        if self.collected == self.published and done == teachers:
            self._training = True
            usable = tuple(peer for peer in self._teachers if self._taught.get(peer, False))
            refused = tuple(peer for peer in self._teachers if peer not in usable)
            work.append(Train(self.published + 1, usable, refused))
        return work

    def _who(self, peers: list[int]) -> str:
        named = [f"{peer}" if peer in self._connected else f"{peer} (not connected)" for peer in peers]
        return f"peer{'s' if len(named) > 1 else ''} {', '.join(named)}"
