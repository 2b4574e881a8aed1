"""The barrier under policy ``all``: the life of a peer as events and decisions."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from barrier_model import greeted, state_of
from hypothesis import given, settings
from hypothesis import strategies as st

from peer._proto.crad.v1 import peer_pb2
from peer.barrier import Barrier
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
    LearnerDown,
    LearnerUp,
    MakeInitialModel,
    ManifestHeld,
    OpenRound,
    Published,
    Release,
    SnapshotHeld,
    SnapshotRefused,
    Taught,
    Teach,
    Train,
)
from peer.intake import parse

OTHERS = (1, 2)


def make(*, rounds: int = 2, published: int = -1, teachers: Iterable[int] = OTHERS, others: Any = OTHERS) -> Barrier:
    """Peer 0's barrier; the same teachers in every round."""
    fixed = tuple(teachers)
    return greeted(Barrier(others, rounds, lambda _number: fixed, published))


def feed(barrier: Barrier, *events: Event) -> list[Decision]:
    """All decisions on these events, in order."""
    return [decision for event in events for decision in barrier.step(event)]


def arrival(peer: int, number: int) -> list[Event]:
    """Everything about one teacher, from the news to the posteriors."""
    return [
        Announced(peer, number),
        ManifestHeld(peer, number),
        SnapshotHeld(peer, number),
        Taught(peer, number, usable=True),
    ]


def running(number: int, *events: Event, rounds: int = 2) -> Barrier:
    """A barrier with its learner up, ``number`` published, and these events behind it."""
    barrier = make(published=number, rounds=rounds)
    feed(barrier, LearnerUp(), *events)
    return barrier


# --- scenarios --------------------------------------------------------------------------------------------------------


def test_a_whole_life() -> None:
    barrier = make()
    script: list[tuple[Event, list[Decision]]] = [
        (Connected(1), []),
        (Announced(1, 0), []),  # nothing is fetched before the own initial model is there
        (LearnerUp(), [MakeInitialModel()]),
        (Published(0), [FetchManifest(1, 0), OpenRound(1)]),
        (ManifestHeld(1, 0), [FetchSnapshot(1, 0)]),
        (SnapshotHeld(1, 0), [Teach(1, 0)]),
        (Taught(1, 0, usable=True), []),
        (Announced(2, 0), [FetchManifest(2, 0)]),
        (ManifestHeld(2, 0), [FetchSnapshot(2, 0), Collected(0)]),
        (SnapshotHeld(2, 0), [Teach(2, 0)]),
        (Taught(2, 0, usable=True), [Train(1, (1, 2), ())]),
        (Announced(2, 1), []),  # they may be a round ahead
        (Published(1), [FetchManifest(2, 1), OpenRound(2)]),
        (Announced(1, 1), [FetchManifest(1, 1)]),
        (ManifestHeld(1, 1), [FetchSnapshot(1, 1)]),
        (ManifestHeld(2, 1), [FetchSnapshot(2, 1), Collected(1)]),
        (SnapshotHeld(2, 1), [Teach(2, 1)]),
        (SnapshotHeld(1, 1), [Teach(1, 1)]),
        (Taught(1, 1, usable=True), []),
        (Taught(2, 1, usable=True), [Train(2, (1, 2), ())]),
        (Published(2), []),
        (Announced(1, 2), [FetchManifest(1, 2)]),
        (ManifestHeld(1, 2), [FetchSnapshot(1, 2)]),  # nobody learns from it, but its owner may lose its disk
        (Announced(2, 2), [FetchManifest(2, 2)]),
        (ManifestHeld(2, 2), [FetchSnapshot(2, 2), Collected(2), Finish()]),
        (SnapshotHeld(2, 2), []),
        (SnapshotHeld(1, 2), [Release()]),
        (LearnerUp(), []),
    ]
    for step, (event, expected) in enumerate(script):
        assert barrier.step(event) == expected, f"step {step}: {event}"


def orders(*sequences: list[Event]) -> Iterator[list[Event]]:
    """All merges that keep the order within each sequence."""
    labels = [number for number, sequence in enumerate(sequences) for _ in sequence]
    for order in sorted(set(itertools.permutations(labels))):
        iterators = [iter(sequence) for sequence in sequences]
        yield [next(iterators[number]) for number in order]


def test_any_order_of_arrival_gives_the_same_work_and_one_training_at_its_end() -> None:
    work = {OpenRound(1), Collected(0), Train(1, (1, 2), ())}
    work |= {kind(peer, 0) for kind in (FetchManifest, FetchSnapshot, Teach) for peer in OTHERS}
    count = 0
    for events in orders(arrival(1, 0), arrival(2, 0)):
        barrier = running(0)
        decisions = [barrier.step(event) for event in events]
        flat = [OpenRound(1), *itertools.chain(*decisions)]
        assert set(flat) == work
        assert len(flat) == len(work)
        assert decisions[-1][-1] == Train(1, (1, 2), ())
        count += 1
    assert count == 70


@pytest.mark.parametrize("reverse", [False, True])
def test_teachers_run_in_the_order_of_arrival_and_are_named_in_the_order_of_ids(reverse: bool) -> None:
    arrivals = OTHERS[::-1] if reverse else OTHERS
    barrier = make(published=0)
    for peer in arrivals:
        feed(barrier, *arrival(peer, 0)[:3])  # while the learner is still starting
    assert barrier.step(LearnerUp()) == [OpenRound(1), *(Teach(peer, 0) for peer in arrivals)]
    assert feed(barrier, *(Taught(peer, 0, usable=True) for peer in arrivals)) == [Train(1, (1, 2), ())]


def test_a_restarted_service_goes_on_after_its_last_round() -> None:
    barrier = make(published=1)
    assert feed(barrier, Announced(1, 2), Announced(2, 1)) == [FetchManifest(1, 1), FetchManifest(2, 1)]
    assert barrier.step(LearnerUp()) == [OpenRound(2)]
    decisions = feed(barrier, *arrival(1, 1), *arrival(2, 1))
    assert decisions[-1] == Train(2, (1, 2), ())


def test_a_service_restarted_after_its_last_round_only_collects() -> None:
    barrier = make(published=2)
    assert feed(barrier, Announced(1, 2), Announced(2, 2)) == [FetchManifest(1, 2), FetchManifest(2, 2)]
    assert barrier.step(ManifestHeld(2, 2)) == [FetchSnapshot(2, 2)]
    assert barrier.step(ManifestHeld(1, 2)) == [FetchSnapshot(1, 2), Collected(2)]
    assert feed(barrier, SnapshotHeld(2, 2), SnapshotHeld(1, 2)) == [Release()]
    assert barrier.step(LearnerUp()) == [Finish()]


def test_a_last_snapshot_that_is_refused_is_not_waited_for() -> None:
    barrier = running(2, *arrival(1, 2)[:3], Announced(2, 2), ManifestHeld(2, 2))
    assert barrier.step(SnapshotRefused(2, 2)) == [Release()]


def test_the_last_snapshot_of_one_that_has_left_is_not_waited_for() -> None:
    barrier = running(2, *arrival(1, 2)[:3], Announced(2, 2))
    assert barrier.step(Gone(2, 2)) == []  # its manifest decides the best round
    assert barrier.step(ManifestHeld(2, 2)) == [Collected(2), Release(), Finish()]


MANIFESTS = [event for peer in OTHERS for event in (Announced(peer, 0), ManifestHeld(peer, 0))]
SNAPSHOTS = [SnapshotHeld(1, 0), SnapshotHeld(2, 0)]
TAUGHT = [Taught(1, 0, usable=True), Taught(2, 0, usable=True)]


@pytest.mark.parametrize(
    ("events", "again"),
    [
        ([], [OpenRound(1)]),
        (MANIFESTS, [OpenRound(1)]),
        ([*MANIFESTS, SNAPSHOTS[1]], [OpenRound(1), Teach(2, 0)]),
        ([*MANIFESTS, *SNAPSHOTS], [OpenRound(1), Teach(1, 0), Teach(2, 0)]),
        ([*MANIFESTS, *SNAPSHOTS, TAUGHT[0]], [OpenRound(1), Teach(1, 0), Teach(2, 0)]),
        ([*MANIFESTS, *SNAPSHOTS, *TAUGHT], [OpenRound(1), Teach(1, 0), Teach(2, 0)]),
    ],
    ids=["nothing here", "manifests", "one snapshot", "teaching", "one taught", "training"],
)
def test_a_learner_that_ends_gets_its_work_again_and_nothing_is_fetched_again(
    events: list[Event], again: list[Decision]
) -> None:
    barrier = running(0, *events)
    assert barrier.step(LearnerDown()) == []
    assert barrier.step(LearnerUp()) == again
    # What it had learnt is gone with it: the round opens only once all teachers have run again.
    missing = [event for event in [*MANIFESTS, *SNAPSHOTS] if event not in events]
    decisions = feed(barrier, *missing, TAUGHT[0])
    assert not any(isinstance(decision, Train) for decision in decisions)
    assert barrier.step(TAUGHT[1]) == [Train(1, (1, 2), ())]


def test_a_learner_that_ends_while_it_makes_the_initial_model_makes_it_again() -> None:
    barrier = make()
    assert feed(barrier, LearnerUp(), LearnerDown()) == [MakeInitialModel()]
    assert barrier.step(LearnerUp()) == [MakeInitialModel()]


def test_a_learner_that_ends_in_the_last_evaluation_evaluates_again() -> None:
    barrier = running(2, *arrival(1, 2), *arrival(2, 2))
    assert feed(barrier, LearnerDown(), LearnerUp()) == [Finish()]


def test_the_network_goes_on_while_the_learner_is_away() -> None:
    barrier = running(0, LearnerDown())
    decisions = feed(barrier, *MANIFESTS, *SNAPSHOTS)
    fetches = [kind(peer, 0) for peer in OTHERS for kind in (FetchManifest, FetchSnapshot)]
    assert [decision for decision in decisions if decision != Collected(0)] == fetches
    assert Collected(0) in decisions
    assert barrier.step(LearnerUp()) == [OpenRound(1), Teach(1, 0), Teach(2, 0)]


def test_a_published_round_is_not_trained_again_after_the_learner_ends() -> None:
    barrier = running(0, *arrival(1, 0), *arrival(2, 0), Published(1))
    assert feed(barrier, LearnerDown(), LearnerUp()) == [OpenRound(2)]


@pytest.mark.parametrize(
    ("usable", "train"),
    [
        ((True, False), Train(1, (1,), (2,))),
        ((False, True), Train(1, (2,), (1,))),
        ((False, False), Train(1, (), (1, 2))),
    ],
)
def test_an_unusable_teacher_is_named_and_left_out(usable: tuple[bool, bool], train: Train) -> None:
    barrier = running(0, *MANIFESTS, *SNAPSHOTS)
    assert barrier.step(Taught(2, 0, usable=usable[1])) == []
    assert barrier.step(Taught(1, 0, usable=usable[0])) == [train]


def test_the_manifest_of_one_that_has_left_is_fetched_all_the_same() -> None:
    barrier = running(2, *arrival(1, 2)[:3], Gone(2, 2))
    assert barrier.step(Announced(2, 2)) == [FetchManifest(2, 2)]
    assert barrier.step(ManifestHeld(2, 2)) == [Collected(2), Release(), Finish()]


def test_a_refusal_is_named_also_where_nobody_teaches_yet() -> None:
    warmup = greeted(Barrier(OTHERS, 2, lambda number: OTHERS if number > 1 else (), published=0))
    feed(warmup, LearnerUp(), *MANIFESTS, SNAPSHOTS[0])
    assert warmup.step(SnapshotRefused(2, 0)) == [Train(1, (), quarantined=(2,))]


def test_a_refusal_does_not_outlast_its_round() -> None:
    barrier = running(0, *MANIFESTS, *SNAPSHOTS, Taught(1, 0, usable=False), TAUGHT[1], Published(1))
    assert feed(barrier, *arrival(1, 1), *arrival(2, 1))[-1] == Train(2, (1, 2), ())


def test_rounds_without_teachers_wait_for_all_manifests_all_the_same() -> None:
    barrier = make(published=0, teachers=())
    assert barrier.step(LearnerUp()) == [OpenRound(1)]
    assert feed(barrier, Announced(1, 0), ManifestHeld(1, 0), Announced(2, 0)) == [
        FetchManifest(1, 0),
        FetchManifest(2, 0),
    ]
    assert barrier.step(ManifestHeld(2, 0)) == [Collected(0), Train(1, (), ())]


def test_teachers_are_asked_for_by_the_round_that_they_teach() -> None:
    warmup = greeted(Barrier(OTHERS, 2, lambda number: OTHERS if number > 1 else (), published=0))
    # What does not teach yet is fetched all the same, since its owner may lose its disk.
    assert feed(warmup, LearnerUp(), *MANIFESTS)[-2:] == [FetchSnapshot(2, 0), Collected(0)]
    assert feed(warmup, *SNAPSHOTS) == [Train(1, (), ())]
    decisions = feed(warmup, Published(1), *arrival(1, 1), *arrival(2, 1))
    assert FetchSnapshot(1, 1) in decisions
    assert decisions[-1] == Train(2, (1, 2), ())


def test_a_single_peer_goes_through_all_its_rounds_alone() -> None:
    barrier = make(others=(), teachers=())
    assert barrier.step(LearnerUp()) == [MakeInitialModel()]
    assert barrier.step(Published(0)) == [Collected(0), OpenRound(1), Train(1, (), ())]
    assert barrier.step(Published(1)) == [Collected(1), OpenRound(2), Train(2, (), ())]
    assert barrier.step(Published(2)) == [Collected(2), Release(), Finish()]


def test_events_given_twice_change_nothing() -> None:
    barrier = make()
    events = [LearnerUp(), Connected(1), *MANIFESTS, *SNAPSHOTS, *TAUGHT, LearnerDown(), Disconnected(1), LearnerUp()]
    events = [LearnerUp(), Published(0), *events]
    for event in events:
        barrier.step(event)
        before = copy.deepcopy(state_of(barrier))
        if not isinstance(event, Published):
            assert barrier.step(event) == [], event
        assert state_of(barrier) == before, event


@pytest.mark.parametrize(
    "event",
    [
        Announced(1, 0),
        ManifestHeld(1, 0),
        SnapshotHeld(1, 0),
        Taught(1, 0, usable=True),
        Taught(1, 0, usable=False),
        # A round ahead of this peer: news worth keeping, but no files or posteriors can be of it.
        ManifestHeld(1, 2),
        SnapshotHeld(1, 2),
        Taught(1, 2, usable=True),
    ],
)
def test_events_about_other_rounds_change_nothing(event: Event) -> None:
    barrier = running(1, Announced(1, 1), rounds=3)
    before = copy.deepcopy(state_of(barrier))
    assert barrier.step(event) == []
    assert state_of(barrier) == before


def test_what_is_here_already_is_not_asked_for() -> None:
    barrier = running(0)
    assert barrier.step(ManifestHeld(1, 0)) == [FetchSnapshot(1, 0)]
    assert barrier.step(Announced(1, 0)) == []
    assert barrier.step(SnapshotHeld(2, 0)) == [Teach(2, 0)]
    assert barrier.step(ManifestHeld(2, 0)) == [Collected(0)]


def test_old_news_does_not_undo_newer() -> None:
    barrier = running(0, Announced(1, 1), Announced(1, 0), *MANIFESTS[2:])
    assert feed(barrier, ManifestHeld(1, 0), *SNAPSHOTS, *TAUGHT, Published(1))[-2:] == [
        FetchManifest(1, 1),
        OpenRound(2),
    ]


@pytest.mark.parametrize("number", [0, 1, 3])
def test_rounds_are_published_one_by_one(number: int) -> None:
    barrier = make(published=1, rounds=4)
    with pytest.raises(ValueError, match=f"round {number} published after round 1"):
        barrier.step(Published(number))


def test_a_refused_snapshot_is_left_out_also_after_the_learner_was_lost() -> None:
    barrier = greeted(Barrier([1, 2], rounds=3, teachers_of=lambda _: (1, 2), published=0))
    for peer in (1, 2):
        barrier.step(Announced(peer, 0))
        barrier.step(ManifestHeld(peer, 0))
    barrier.step(LearnerUp())
    barrier.step(SnapshotRefused(1, 0))
    assert "waits for the snapshots of peer 2 " in barrier.explain()
    assert barrier.step(SnapshotHeld(2, 0)) == [Teach(2, 0)]
    barrier.step(LearnerDown())
    assert barrier.step(LearnerUp()) == [OpenRound(1), Teach(2, 0)]
    assert barrier.step(Taught(2, 0, usable=True)) == [Train(1, teachers=(2,), quarantined=(1,))]
    barrier.step(Published(1))
    assert barrier.step(SnapshotRefused(2, 0)) == []  # of a round that is over
    assert barrier.teachers_done == (0, 2)


# --- explain ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("published", "events", "sentence"),
    [
        (-1, [], "the learner process is starting"),
        (-1, [LearnerUp()], "the initial model is being made"),
        (0, [LearnerUp()], "round 1 waits for round 0 of peers 1 (not connected), 2 (not connected)"),
        (0, [LearnerUp(), Connected(1)], "round 1 waits for round 0 of peers 1, 2 (not connected)"),
        (0, [LearnerUp(), Connected(2), Disconnected(2), *MANIFESTS[:2]], "round 1 waits for round 0 of peer 2 (not"),
        (0, [LearnerUp(), Connected(2), *MANIFESTS], "round 1 waits for the snapshots of peers 1 (not connected), 2"),
        (0, [LearnerUp(), Connected(2), *MANIFESTS, SNAPSHOTS[0]], "round 1 waits for the snapshots of peer 2"),
        (0, [LearnerUp(), *MANIFESTS, *SNAPSHOTS], "round 1 waits for the learner to run 2 of 2 teachers"),
        (0, [LearnerUp(), *MANIFESTS, *SNAPSHOTS, TAUGHT[1]], "round 1 waits for the learner to run 1 of 2 teachers"),
        (0, [LearnerUp(), *MANIFESTS, *SNAPSHOTS, *TAUGHT], "round 1 is being trained"),
        (0, [LearnerUp(), *MANIFESTS, *SNAPSHOTS, *TAUGHT, LearnerDown()], "the learner process is starting"),
        (1, [LearnerUp(), Connected(1), Connected(2)], "round 2 waits for round 1 of peers 1, 2"),
        (
            2,
            [LearnerUp(), Connected(1), Announced(2, 2), ManifestHeld(2, 2)],
            "all 2 rounds are done here; waits for the last round of peer 1",
        ),
        (2, [LearnerUp(), *arrival(1, 2), *arrival(2, 2)], "all 2 rounds are done here and everywhere"),
    ],
)
def test_explain_says_what_is_waited_for(published: int, events: list[Event], sentence: str) -> None:
    barrier = make(published=published)
    feed(barrier, *events)
    found = barrier.explain()
    assert found.startswith(sentence) if sentence.endswith("(not") else found == sentence
    named = re.search(r"(?<=of )peers? [^;]*", sentence)
    assert barrier.explained() == ([int(number) for number in re.findall(r"\d+", named[0])] if named else [])


# --- any sequence of events -------------------------------------------------------------------------------------------

_PEERS, _ROUNDS = st.sampled_from(OTHERS), st.integers(0, 3)
_EVENTS = st.one_of(
    st.builds(LearnerUp),
    st.builds(LearnerDown),
    st.builds(Connected, _PEERS),
    st.builds(Disconnected, _PEERS),
    st.builds(Announced, _PEERS, _ROUNDS),
    st.builds(ManifestHeld, _PEERS, _ROUNDS),
    st.builds(SnapshotHeld, _PEERS, _ROUNDS),
    st.builds(Taught, _PEERS, _ROUNDS, st.booleans()),
    st.just("publish"),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(_EVENTS, max_size=60))
def test_whatever_comes_a_round_is_trained_only_with_everything_of_the_round_before(events: list[Any]) -> None:
    barrier, twin = make(published=0, rounds=3), make(published=0, rounds=3)
    seen: set[Event] = set()
    asked: set[Decision] = set()  # by the process of now, or by the service as a whole for what it fetches
    for item in events:
        if item == "publish":
            if barrier.published == barrier.rounds:
                continue
            item = Published(barrier.published + 1)
        seen = set() if isinstance(item, Published) else seen | {item}
        if isinstance(item, LearnerDown):
            seen = {event for event in seen if not isinstance(event, Taught)}
            asked = {each for each in asked if isinstance(each, FetchManifest | FetchSnapshot | Collected)}
        decisions = barrier.step(item)
        assert twin.step(item) == decisions  # equal events, equal decisions
        assert isinstance(barrier.explain(), str)
        for decision in decisions:
            assert decision not in asked, "asked twice"
            asked.add(decision)
            if isinstance(decision, Train):
                last = barrier.published
                assert decision.round == last + 1 <= barrier.rounds
                assert sorted(decision.teachers + decision.quarantined) == list(OTHERS)
                assert seen >= {ManifestHeld(peer, last) for peer in OTHERS}
                assert {event.peer for event in seen if isinstance(event, Taught) and event.round == last} == set(
                    OTHERS
                )


def test_what_a_peer_of_hundreds_says_fits_into_the_message_in_which_it_says_it() -> None:
    others = range(1, 300)
    strange = Barrier(others, 2, lambda _number: tuple(others), 0)
    feed(strange, LearnerUp())
    waiting = make(others=others, teachers=others, published=0)
    feed(waiting, LearnerUp(), *(Connected(peer) for peer in others if peer != 250))
    cut_off = make(others=others, teachers=others, published=0)
    feed(cut_off, LearnerUp(), *(Disconnected(peer) for peer in others))
    said = [barrier.explain() for barrier in (strange, waiting, cut_off)]
    for sentence in said:
        assert "and 287 others" in sentence
        parse(peer_pb2.PeerState, peer_pb2.PeerState(phase="wait", explanation=sentence).SerializeToString())
    assert said[1].startswith("round 1 waits for round 0 of peers 250 (not connected), 1, 2, 3,")
