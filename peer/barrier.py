"""When a round opens: a state machine without clock, socket, file or randomness.

Events go in, decisions come out (``peer.events``), and equal events give equal decisions. P is the highest round that
this peer has durably published.

Policy ``all``: round P+1 is trained only with the round-P snapshot of every other peer. It follows that no two peers
are ever more than one round apart, and that nobody needs a round older than another's P-1.

Policy ``quorum``: once every peer that is still missing has had its time (``peer.deadlines``), round P+1 opens without
them, if at least ``min`` peers, this one included, have published round P. ``min`` is more than half of all, so two
parts of a broken network can never both go on. It follows that whatever round the first peer has published, ``min``
peers have published the one before. A peer that was left behind by two rounds or more publishes its last model again
as the round of the mesh (:class:`Rejoin`), and takes part from there.

Rounds in which nobody teaches (method ``local``, warm-up) wait for the manifests of round P all the same, so the rule
about distance holds for every method and all peers can choose the same best round. The snapshot of a peer that ever
teaches this one is fetched in every round, the last one included: so others always have the newest model of a peer that
loses its disk.

With partial participation (policy ``all`` alone) "round P of a peer" is its version as of round P: what it published
last up to there. A peer trains round P+1 if it takes part in it, and else passes it: that publishes nothing, and waits
for the manifests of round P, as training does. P is then the last round that this peer has published or passed.
Snapshots are only waited for where this peer learns from them. docs/participation.md has the proof that nobody is asked
for a snapshot that it has deleted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from crad_p2p.participation import Part
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
    GiveUp,
    Gone,
    LearnerDown,
    LearnerUp,
    MakeInitialModel,
    ManifestHeld,
    OpenRound,
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
from peer.words import MOST_NAMED, NOT_CONNECTED, name_peers

#: Teachers of a round, by its number.
TeachersOf = Callable[[int], tuple[int, ...]]

#: Stands for this peer among the round times.
_SELF = -1


@dataclass(frozen=True)
class Quorum:
    """Policy ``quorum``.

    Attributes:
        min: peers, this one included, without which no round opens; more than half of all.
        max_staleness: rounds by which the weights of a teacher may be behind those of its round.
        grace: seconds added to what is known of a peer's speed.
    """

    min: int
    max_staleness: int
    grace: float


@dataclass
class State:
    """All that a barrier remembers; plain values, so that it can be copied, compared and written down."""

    published: int
    announced: dict[int, int]
    start_until: float
    now: float = 0.0
    since: float = 0.0  # when waiting for the others' round ``published`` began
    collected: int = -1
    connected: set[int] = field(default_factory=set)
    greeted: set[int] = field(default_factory=set)  # connected at least once
    absent: set[int] = field(default_factory=set)  # missed its time, and has not been back since
    on_word: set[int] = field(default_factory=set)  # was absent, is back by what it says, and nothing has come yet
    broken: set[int] = field(default_factory=set)  # missed its time again after that: its word does not count now
    newest: dict[int, tuple[int, int]] = field(default_factory=dict)  # newest snapshot held: its round, its weights'
    ahead: dict[int, int] = field(default_factory=dict)  # of whom a manifest is here of a round beyond the next
    times: RoundTimes = field(default_factory=RoundTimes)
    given_up: bool = False
    rejoining: int = -1
    # Of this round:
    manifests: set[int] = field(default_factory=set)
    older: dict[int, int] = field(default_factory=dict)  # manifests of an earlier round, for stale teachers
    snapshots: dict[int, int] = field(default_factory=dict)  # in order of arrival: the round of the weights
    refused: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)
    asked: set[tuple[str, int, int]] = field(default_factory=set)
    # Once nobody is waited for any more: teachers, the round of their snapshot and that of its weights. What comes
    # later does not change it, though it may replace what ``newest`` says.
    chosen: dict[int, tuple[int, int]] | None = None
    # Of the learner in this round:
    learner_up: bool = False
    learner_seen: bool = False  # since the start: nothing can be fetched before, so nobody is late
    opened: bool = False
    given: dict[int, int] = field(default_factory=dict)
    taught: dict[int, bool] = field(default_factory=dict)
    training: bool = False
    finished: bool = False
    released: bool = False


class Barrier:
    """The barrier of one peer.

    Args:
        others: ids of all other peers.
        rounds: R, the last round.
        teachers_of: which of the others teach a given round.
        published: the highest round found on disk, or known to be passed; -1 for none.
        quorum: None for policy ``all``.
        now: the time at the start.
        part: which rounds are whose, with policy ``all``; None if everybody takes part in every round.
        start_wait: seconds in which all others must have been reached once, unless a round was trained before; with a
            quorum, also for peers of whose speed nothing is known yet.
    """

    def __init__(
        self,
        others: Iterable[int],
        rounds: int,
        teachers_of: TeachersOf,
        published: int = -1,
        *,
        quorum: Quorum | None = None,
        part: Part | None = None,
        now: float = 0.0,
        start_wait: float = math.inf,
    ) -> None:
        self.others = tuple(sorted(others))
        self.rounds = rounds
        self.quorum = quorum
        self.part = part
        self.start_wait = start_wait
        self.state = State(published, dict.fromkeys(self.others, -1), start_until=now + start_wait, now=now, since=now)
        self._teachers_of = teachers_of
        self._sources = {j for number in range(1, rounds + 1) for j in teachers_of(number)}
        self._find_teachers()

    @property
    def published(self) -> int:
        """P: the last round that this peer has published or passed."""
        return self.state.published

    @property
    def teachers(self) -> tuple[int, ...]:
        """Who may teach the next round."""
        return self._teachers

    @property
    def sources(self) -> tuple[int, ...]:
        """Whose snapshots are fetched: those who teach this peer in any round."""
        return tuple(sorted(self._sources))

    @property
    def teachers_done(self) -> tuple[int, int]:
        """How many of this round's teachers the learner has run, and how many there are."""
        s = self.state
        expected = s.chosen if s.chosen is not None else set(self._teachers) - s.refused
        return len(s.taught), len(expected)

    @property
    def waited_for_at_the_end(self) -> tuple[int, ...]:
        """The others for whom this peer goes on serving: all but those that were away when the rounds ended."""
        return tuple(j for j in self.others if j not in self.state.absent or j in self.state.connected)

    @property
    def waited_for(self) -> tuple[int, ...]:
        """The others of whom something is still to come before the next round opens, or the last one is over."""
        return tuple(self._pending())

    @property
    def uncollected(self) -> tuple[int, ...]:
        """The others whose manifest of the last published round is not here."""
        return tuple(j for j in self.others if j not in self.state.manifests)

    @property
    def wake_at(self) -> float | None:
        """When time alone may change something; a :class:`Tick` is due then."""
        s = self.state
        times = [s.start_until] if self._start_matters() else []
        if self.quorum and s.chosen is None and s.published >= 0:
            times += [self._deadline(j) for j in self._pending()]
        later = [time for time in times if s.now < time < math.inf]
        return max(later, default=None)

    def step(self, event: Event) -> list[Decision]:
        """Take in one event; what is to be done now, in order. Events about past rounds change nothing."""
        s = self.state
        match event:
            case Tick(now):
                s.now = now
            case Connected(peer):
                s.connected.add(peer)
                s.greeted.add(peer)
            case Disconnected(peer):
                s.connected.discard(peer)
            case Announced(peer, number, busy):
                self._hear(peer, number, busy)
            case ManifestHeld(peer, number):
                self._take_manifest(peer, number)
            case SnapshotHeld(peer, number, model_round):
                self._take_snapshot(peer, number, number if model_round is None else model_round)
            case SnapshotRefused(peer, number, manifest) if number == self._due(peer):
                s.refused.add(peer)
                if manifest:
                    s.manifests.add(peer)
            case Gone(peer, number) if number == self._due(peer):
                s.gone.add(peer)
            case LearnerUp():
                if not s.learner_seen:
                    s.learner_seen, s.since = True, s.now
                s.learner_up = True
            case LearnerDown():
                self._forget_learner()
            case Taught(peer, number, usable) if s.given.get(peer) == number:
                s.taught[peer] = usable
            case Published(number, busy):
                self._publish(number, busy)
        return self._decide()

    # --- who takes part --------------------------------------------------------------------------------------------

    def _due(self, j: int) -> int:
        """The round of the snapshot that a peer must have published for round P to be over: P itself, or before it."""
        published = self.state.published
        return published if self.part is None or published < 0 else self.part.version(j, published)

    def _is_source(self, j: int) -> bool:
        """Whether a peer's snapshot that is due is fetched."""
        return j in self._sources and (self.part is None or self.part.takes(j, self.state.published))

    def _is_needed(self, j: int) -> bool:
        """Whether nothing goes on without it: what is for a later round, or a mere copy, is waited for at the end."""
        if self.part is None or self.state.published == self.rounds:
            return self._is_source(j)
        following = self.state.published + 1
        return self.part.is_active(following) and self._is_source(j) and self.part.version(j, following) == following

    def _may_pass(self) -> bool:
        """Whether round P is over and P+1 is none of this peer's."""
        s = self.state
        if self.part is None or not 0 <= s.published < self.rounds:
            return False
        return s.chosen is not None and not self.part.is_active(s.published + 1)

    # --- events ----------------------------------------------------------------------------------------------------

    def _hear(self, peer: int, number: int, busy: float) -> None:
        s = self.state
        is_news = s.announced[peer] < number <= self.rounds
        if self.quorum and busy > 0 and (is_news or peer not in s.times.said):  # after a start an old round will do
            s.times.say(peer, busy)
        if not is_news:
            return
        s.announced[peer] = number
        if peer in s.absent and peer not in s.broken and number >= s.published - 1:
            s.absent.discard(peer)
            s.on_word.add(peer)

    def _deliver(self, peer: int, number: int) -> None:
        """Something of a peer has come that is new enough: it is waited for, whatever was before."""
        s = self.state
        if number >= s.published - 1:
            for names in (s.absent, s.on_word, s.broken):
                names.discard(peer)

    def _take_manifest(self, peer: int, number: int) -> None:
        s = self.state
        if peer not in self._sources:
            self._deliver(peer, number)
        if number == self._due(peer):
            s.manifests.add(peer)
        elif self.quorum and s.published + 1 < number <= self.rounds:
            s.ahead[peer] = max(number, s.ahead.get(peer, -1))
        elif self.quorum and number < s.published:
            s.older[peer] = max(number, s.older.get(peer, -1))

    def _take_snapshot(self, peer: int, number: int, model_round: int) -> None:
        s = self.state
        self._deliver(peer, number)
        if self.quorum and s.newest.get(peer, (-1, -1))[0] <= number <= s.published:
            s.newest[peer] = (number, model_round)
        if number == self._due(peer) and peer not in s.snapshots:
            if self.quorum and s.chosen is None and s.published > 0 and s.now <= self._deadline(peer):
                # Neither what comes late nor when the others were started says how long a round takes.
                s.times.see(peer, s.now - s.since)
            s.snapshots[peer] = model_round

    def _publish(self, number: int, busy: float) -> None:
        s = self.state
        rejoined = number == s.rejoining
        if number != s.published + 1 and not rejoined:
            raise ValueError(f"round {number} published after round {s.published}")
        if self.quorum and busy > 0:
            s.times.say(_SELF, busy)
        s.rejoining = -1
        self._advance(number)
        s.ahead = {j: ahead for j, ahead in s.ahead.items() if ahead > number + 1}
        self._reset_learner_work()
        if rejoined:
            s.learner_up = False  # it holds another model until it has been given this one
        self._find_teachers()

    def _advance(self, number: int) -> None:
        """P becomes ``number``. What is here of peers that had no part in it stays what is due."""
        s = self.state
        stays = set[int]() if self.part is None else {j for j in self.others if self.part.version(j, number) < number}
        s.published, s.since, s.chosen, s.older = number, s.now, None, {}
        for names in (s.manifests, s.refused, s.gone):
            names &= stays
        s.snapshots = {j: trained for j, trained in s.snapshots.items() if j in stays}
        s.asked = {key for key in s.asked if key[1] in stays}

    def _find_teachers(self) -> None:
        published = self.state.published
        self._teachers = self._teachers_of(published + 1) if published < self.rounds else ()

    def _forget_learner(self) -> None:
        self.state.learner_up = False
        self._reset_learner_work()

    def _reset_learner_work(self) -> None:
        s = self.state
        s.opened, s.training, s.finished = False, False, False
        s.given, s.taught = {}, {}

    # --- decisions -------------------------------------------------------------------------------------------------

    def _decide(self) -> list[Decision]:
        s = self.state
        decisions = self._start_or_give_up()
        if s.published < 0:
            return decisions + self._make_initial_model()
        if s.rejoining >= 0:
            return decisions
        if self._is_left_behind() and self._has_met_enough():
            s.rejoining = self._round_of_the_mesh()
            return [*decisions, Rejoin(s.rejoining)]
        decisions += self._collect()
        while self._may_pass():
            self._advance(s.published + 1)
            self._find_teachers()
            decisions += self._collect()
        if s.published == self.rounds:
            if s.chosen is not None and not s.released:
                s.released = True
                decisions.append(Release())
            if s.collected == self.rounds and s.learner_up and not s.finished:
                s.finished = True
                decisions.append(Finish())
        elif s.learner_up and not s.training and (self.part is None or self.part.is_active(s.published + 1)):
            decisions += self._learner_work()
        return decisions

    def _collect(self) -> list[Decision]:
        s, decisions = self.state, self._fetches()
        if s.chosen is None and self._is_time_to_choose():
            self._choose()
        if s.collected < s.published and (s.chosen is not None or s.manifests.issuperset(self.others)):
            s.collected = s.published
            decisions.append(Collected(s.published))
        return decisions

    def _is_left_behind(self) -> bool:
        return self._round_of_the_mesh() >= 0 and not self.state.training

    def _round_of_the_mesh(self) -> int:
        """The highest round to which the others have gone on without this peer; -1 if they have not.

        As many others as a round needs beside this one must have come as far as the round before: so a single peer
        that claims a round far ahead does not make this one skip any.
        """
        s = self.state
        needed = self.quorum.min - 1 if self.quorum else math.inf
        found = (k for k in s.ahead.values() if sum(s.announced[j] >= k - 1 for j in self.others) >= needed)
        return max(found, default=-1)

    def _start_matters(self) -> bool:
        s = self.state
        return s.published <= 0 and not s.given_up and not s.greeted.issuperset(self.others)

    def _start_or_give_up(self) -> list[Decision]:
        s = self.state
        if not self._start_matters() or s.now < s.start_until or self._has_met_enough():
            return []
        s.given_up = True
        return [GiveUp(tuple(j for j in self.others if j not in s.greeted))]

    def _has_met_enough(self) -> bool:
        """Whether those have been reached since the start who would know if this peer's disk has lost a round."""
        met = 1 + len(self.state.greeted)
        return met >= (self.quorum.min if self.quorum else 1 + len(self.others))

    def _make_initial_model(self) -> list[Decision]:
        s = self.state
        if not s.learner_up or s.training:
            return []
        s.training = True
        return [MakeInitialModel()]

    # --- what is fetched -------------------------------------------------------------------------------------------

    def _fetches(self) -> list[Decision]:
        wanted: list[Decision] = []
        for j in self.others:
            wanted += self._wanted_of(j)
        fresh = [each for each in wanted if _key(each) not in self.state.asked]
        self.state.asked.update(map(_key, fresh))
        return sorted(fresh, key=lambda each: isinstance(each, FetchSnapshot))

    def _wanted_of(self, j: int) -> list[Decision]:
        s, wanted = self.state, list[Decision]()
        said, number = s.announced[j], self._due(j)
        if said >= number and j not in s.manifests and (j not in s.gone or self._is_final(j)):
            wanted.append(FetchManifest(j, number))
        if self._is_source(j) and j in s.manifests and j not in s.gone | s.refused and j not in s.snapshots:
            wanted.append(FetchSnapshot(j, number))
        if self.quorum and max(0, number - self.quorum.max_staleness) <= said < number:
            if j in self._teachers and s.newest.get(j, (-1, -1))[0] < said:  # it may have to teach with that
                wanted.append(FetchSnapshot(j, said) if s.older.get(j) == said else FetchManifest(j, said))
        elif self.quorum and said > number + 1:
            wanted.append(FetchManifest(j, said))
        return wanted

    def _is_final(self, j: int) -> bool:
        """Whether a peer's round that is due is its last one."""
        return self._due(j) == (self.rounds if self.part is None else self.part.version(j, self.rounds))

    # --- who is waited for -----------------------------------------------------------------------------------------

    def _has_arrived(self, j: int) -> bool:
        s = self.state
        return j in s.manifests and (not self._is_needed(j) or j in s.snapshots or j in s.refused)

    def _pending(self) -> list[int]:
        s = self.state
        # Of the last round only a snapshot can be gone, with an owner that has left: manifests decide the best round.
        lost = s.gone & s.manifests if s.published == self.rounds else s.gone if self.quorum else ()
        return [j for j in self.others if not self._has_arrived(j) and j not in lost]

    def _is_present(self, j: int) -> bool:
        """Whether it counts for the quorum: it is known to have published round P, or a later one."""
        s = self.state
        return self._has_arrived(j) or j in s.gone or s.announced[j] > s.published

    def _deadline(self, j: int) -> float:
        """Until when a peer is waited for, under policy ``quorum``."""
        assert self.quorum
        s = self.state
        if s.published <= 0:
            return s.start_until
        if j in s.absent:
            return s.since
        allowance = s.times.allowance(j, self.quorum.grace)
        if allowance is None and (common := s.times.common_allowance(self.quorum.grace)) is not None:
            # One that is there may be slow, and has the start wait to show how slow; who never says is like the rest.
            return max(s.since + common, s.start_until) if j in s.connected else s.since + common
        return s.since + (self.start_wait if allowance is None else allowance)

    def _has_quorum(self) -> bool:
        assert self.quorum
        present = 1 + sum(map(self._is_present, self.others))
        return present >= self.quorum.min or self.state.published == self.rounds

    def _is_time_to_choose(self) -> bool:
        pending = self._pending()
        if not self.quorum:
            return not pending
        if pending and not self.state.learner_seen:
            return False
        return all(self.state.now >= self._deadline(j) for j in pending) and self._has_quorum()

    def _choose(self) -> None:
        """Nobody is waited for any more: fix who teaches, and with what."""
        s = self.state
        s.chosen = {}
        for j in self._teachers:
            held = (self._due(j), s.snapshots[j]) if j in s.snapshots else s.newest.get(j)
            if held and j not in s.refused and self._is_fresh_enough(j, held[1]):
                s.chosen[j] = held
        missed = set(self._pending())
        s.absent |= missed
        s.broken |= missed & s.on_word

    def _is_fresh_enough(self, j: int, model_round: int) -> bool:
        return self._due(j) - model_round <= (self.quorum.max_staleness if self.quorum else 0)

    # --- the learner's work ----------------------------------------------------------------------------------------

    def _learner_work(self) -> list[Decision]:
        s, work = self.state, list[Decision]()
        if not s.opened:
            s.opened = True
            work.append(OpenRound(s.published + 1))
        if s.chosen is None:
            ready = {
                j: self._due(j) for j in self._teachers if j in s.snapshots and self._is_fresh_enough(j, s.snapshots[j])
            }
        else:
            ready = {j: number for j, (number, _) in s.chosen.items()}
        for j in sorted(ready, key=_in_order(s.snapshots)):
            if j not in s.given:
                s.given[j] = ready[j]
                work.append(Teach(j, ready[j]))
        if s.chosen is not None and s.taught.keys() >= s.chosen.keys() and self._has_met_enough():
            s.training = True
            work.append(self._train(s.chosen))
        return work

    def _train(self, chosen: dict[int, tuple[int, int]]) -> Train:
        s = self.state
        teachers = tuple(j for j in self._teachers if j in chosen and s.taught[j])
        others = [j for j in self._teachers if j not in teachers]
        refused = {j for j in s.refused if self.part is None or j in self._teachers or self._is_needed(j)}
        quarantined = tuple(sorted({j for j in others if j in chosen} | refused.difference(teachers)))
        missing = tuple(j for j in others if j not in quarantined)
        stale = tuple((j, chosen[j][0]) for j in teachers if chosen[j][1] < self._due(j))
        return Train(s.published + 1, teachers, quarantined, missing, stale)

    # --- words -----------------------------------------------------------------------------------------------------

    def explain(self) -> str:
        """One sentence: whom or what this peer waits for, and how long at most."""
        s = self.state
        if s.rejoining >= 0:
            return f"the mesh went on without this peer: its last model is published again as round {s.rejoining}"
        if s.published < 0 and s.learner_up:
            return "the initial model is being made"
        if not s.learner_up:
            return "the learner process is starting"
        if self._is_left_behind():
            return f"the mesh went on to round {self._round_of_the_mesh()} without this peer; it {self._strangers()}"
        waits = self._wait()
        if s.published == self.rounds:
            if s.chosen is None and waits:
                return f"all {self.rounds} rounds are done here; {waits}"
            unpublished = [j for j in self.others if j not in s.manifests]
            where = "everywhere" if not unpublished else f"everywhere but at {self._who(unpublished)}"
            return f"all {self.rounds} rounds are done here and {where}"
        opening = self._opening()
        if s.training:
            return f"{opening} is being trained"
        if s.chosen is None and waits:
            return f"{opening} {waits}"
        done, teachers = self.teachers_done
        if done < teachers:
            return f"{opening} waits for the learner to run {teachers - done} of {teachers} teachers"
        return f"{opening} {self._strangers()}"

    def _opening(self) -> str:
        following = self.state.published + 1
        if self.part is None or self.part.is_active(following):
            return f"round {following}"
        own = self.part.schedule.following(self.part.me, following)
        then = f"the next is round {own}" if own is not None else "nor any later one"
        return f"round {following} is not this peer's, {then}; it"

    def explained(self) -> list[int]:
        """The other peers that the sentence of :meth:`explain` is about."""
        s = self.state
        if s.rejoining >= 0 or s.published < 0 or not s.learner_up:
            return []
        strangers = [j for j in self.others if j not in s.greeted]
        if self._is_left_behind():
            return strangers
        if s.training and s.published < self.rounds:
            return []
        if s.chosen is None and (waited_for := self._waited_for()):
            return [j for j in waited_for if j not in s.manifests] or waited_for
        done, teachers = self.teachers_done
        return [] if s.published == self.rounds or done < teachers else strangers

    def _waited_for(self) -> list[int]:
        """For whom the choice of teachers waits; those whose absence is known count only if nobody else is left."""
        pending = self._pending()
        return [j for j in pending if j not in self.state.absent] or pending

    def _wait(self) -> str:
        s = self.state
        waited_for = self._waited_for()
        if not waited_for:
            return ""
        what = "the last round" if s.published == self.rounds else f"round {s.published}"
        if unpublished := [j for j in waited_for if j not in s.manifests]:
            return f"waits for {what} of {self._who(unpublished)}{self._limit(waited_for)}"
        return f"waits for the snapshots of {self._who(waited_for)}{self._limit(waited_for)}"

    def _strangers(self) -> str:
        strangers = [j for j in self.others if j not in self.state.greeted]
        verb = "has" if len(strangers) == 1 else "have"
        return f"waits until {name_peers(strangers)} {verb} been reached since the start"

    def _who(self, peers: list[int]) -> str:
        connected = self.state.connected
        if len(peers) > MOST_NAMED:  # not all are named, and these matter most
            peers = sorted(peers, key=lambda peer: peer in connected)
        return name_peers(f"{peer}" if peer in connected else f"{peer} {NOT_CONNECTED}" for peer in peers)

    def _limit(self, peers: list[int]) -> str:
        """Until when, in words; stays the same while time passes."""
        s = self.state
        if not self.quorum:
            return ""
        size = 1 + len(self.others)
        if not self._has_quorum():
            present = 1 + sum(map(self._is_present, self.others))
            return f"; it needs {self.quorum.min} of {size} peers and has {present}"
        limit = f", {max(0.0, max(map(self._deadline, peers)) - s.since):.0f} s at most"
        enough = f"; {self.quorum.min} of {size} peers are enough then"
        return limit if s.published == self.rounds else limit + enough


def _key(decision: Decision) -> tuple[str, int, int]:
    assert isinstance(decision, FetchManifest | FetchSnapshot)
    return type(decision).__name__, decision.peer, decision.round


def _in_order(snapshots: dict[int, int]) -> Callable[[int], tuple[int, int]]:
    """Those that came in this round first, as they came; then the stale ones by id."""
    order = {j: place for place, j in enumerate(snapshots)}
    return lambda j: (order.get(j, len(order)), j)
