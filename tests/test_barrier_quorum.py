"""The barrier under policy ``quorum``: deadlines, stale teachers, peers that are left behind and come back."""

from __future__ import annotations

import math
from typing import Any

import pytest
from barrier_model import state_of

from peer.barrier import Barrier, Quorum
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

OTHERS = (1, 2)
GRACE, START = 5.0, 100.0


def make(
    *,
    published: int = -1,
    rounds: int = 9,
    least: int = 2,
    staleness: int = 2,
    others: tuple[int, ...] = OTHERS,
    teachers: tuple[int, ...] | None = None,
    now: float = 0.0,
) -> Barrier:
    """Peer 0's barrier; it has reached nobody yet. The same teachers in every round."""
    fixed = others if teachers is None else teachers
    quorum = Quorum(least, staleness, GRACE)
    return Barrier(others, rounds, lambda _number: fixed, published, quorum=quorum, now=now, start_wait=START)


def feed(barrier: Barrier, *events: Event) -> list[Decision]:
    """All decisions on these events, in order."""
    return [decision for event in events for decision in barrier.step(event)]


def running(number: int, *events: Event, busy: float = 10.0, **settings: Any) -> Barrier:
    """All are connected, the learner is up, every peer has worked ``busy`` seconds for round ``number``, just published
    here; and these events are behind it.
    """
    barrier = make(published=number - 1, **settings)
    feed(barrier, *(Connected(peer) for peer in barrier.others))
    # What the others did for an earlier round is known; that this peer publishes the next is a trick to set the clock.
    feed(barrier, *(Announced(peer, number - 1, busy) for peer in barrier.others), LearnerUp(), Published(number, busy))
    feed(barrier, *events)
    return barrier


def arrival(peer: int, number: int, *, model_round: int | None = None, busy: float = 10.0) -> list[Event]:
    """Everything about one teacher, from the news to the posteriors."""
    return [
        Announced(peer, number, busy),
        ManifestHeld(peer, number),
        SnapshotHeld(peer, number, model_round),
        Taught(peer, number, usable=True),
    ]


def follow(barrier: Barrier, script: list[tuple[Event, list[Decision]]]) -> None:
    for step, (event, expected) in enumerate(script):
        assert barrier.step(event) == expected, f"step {step}: {event}"


# --- a whole life -----------------------------------------------------------------------------------------------------


def test_a_life_with_a_peer_that_is_killed_and_comes_back() -> None:
    barrier = make(rounds=4)
    follow(
        barrier,
        [
            (Connected(1), []),
            (Connected(2), []),
            (LearnerUp(), [MakeInitialModel()]),
            (Tick(4.0), []),
            (Published(0, 4.0), [OpenRound(1)]),
            # Round 1: all are there.
            (Announced(1, 0, 4.0), [FetchManifest(1, 0)]),
            (Announced(2, 0, 4.0), [FetchManifest(2, 0)]),
            (ManifestHeld(1, 0), [FetchSnapshot(1, 0)]),
            (ManifestHeld(2, 0), [FetchSnapshot(2, 0), Collected(0)]),
            (SnapshotHeld(2, 0), [Teach(2, 0)]),
            (SnapshotHeld(1, 0), [Teach(1, 0)]),
            (Taught(2, 0, usable=True), []),
            (Taught(1, 0, usable=True), [Train(1, (1, 2))]),
            (Tick(20.0), []),
            (Published(1, 16.0), [OpenRound(2)]),
            # Round 2: peer 2 is killed. Its own round took 4 s, so it has until 20 + 2 x 4 + 5.
            (Disconnected(2), []),
            (Announced(1, 1, 16.0), [FetchManifest(1, 1)]),
            (ManifestHeld(1, 1), [FetchSnapshot(1, 1)]),
            (SnapshotHeld(1, 1), [Teach(1, 1)]),
            (Taught(1, 1, usable=True), []),
            (Tick(32.9), []),
            (Tick(33.0), [Collected(1), Teach(2, 0)]),  # its last snapshot still teaches
            (Taught(2, 0, usable=True), [Train(2, (1, 2), stale=((2, 0),))]),
            (Tick(50.0), []),
            (Published(2, 17.0), [OpenRound(3)]),
            # Round 3: nobody waits for it any more.
            (Announced(1, 2, 16.0), [FetchManifest(1, 2)]),
            (ManifestHeld(1, 2), [FetchSnapshot(1, 2)]),
            (SnapshotHeld(1, 2), [Collected(2), Teach(1, 2), Teach(2, 0)]),
            (Taught(1, 2, usable=True), []),
            (Taught(2, 0, usable=True), [Train(3, (1, 2), stale=((2, 0),))]),
            # It is back, and publishes its last model again as round 2, while round 3 is being trained.
            (Connected(2), []),
            (Announced(2, 0, 4.0), []),
            (Announced(2, 2), [FetchManifest(2, 2)]),
            (Tick(70.0), []),
            (Published(3, 20.0), [FetchManifest(2, 2), OpenRound(4)]),
            # Round 4 waits for it again.
            (Announced(1, 3, 16.0), [FetchManifest(1, 3)]),
            (ManifestHeld(1, 3), [FetchSnapshot(1, 3)]),
            (SnapshotHeld(1, 3), [Teach(1, 3)]),
            (Taught(1, 3, usable=True), []),
            (Announced(2, 3, 6.0), [FetchManifest(2, 3)]),
            (ManifestHeld(2, 3), [FetchSnapshot(2, 3), Collected(3)]),
            (SnapshotHeld(2, 3), [Teach(2, 3)]),
            (Taught(2, 3, usable=True), [Train(4, (1, 2))]),
            (Tick(90.0), []),
            (Published(4, 20.0), []),
            (Announced(1, 4, 16.0), [FetchManifest(1, 4)]),
            (ManifestHeld(1, 4), [FetchSnapshot(1, 4)]),
            (SnapshotHeld(1, 4), []),
            (Tick(200.0), [Collected(4), Release(), Finish()]),  # the last round of peer 2 never came
        ],
    )
    assert barrier.waited_for_at_the_end == (1, 2)  # it is connected: it may still be at work


# --- deadlines --------------------------------------------------------------------------------------------------------


def trains(decisions: list[Decision]) -> list[Train]:
    return [decision for decision in decisions if isinstance(decision, Train)]


def test_a_slow_peer_is_waited_for_as_long_as_its_rounds_take() -> None:
    barrier = running(5, Announced(2, 5, 200.0), *arrival(1, 5))
    assert barrier.wake_at == 2 * 200.0 + GRACE
    assert trains(barrier.step(Tick(404.9))) == []
    assert trains(barrier.step(Tick(405.0))) == [Train(6, (1,), missing=(2,))]


def test_all_deadlines_must_pass() -> None:
    barrier = running(5, Announced(1, 5, 50.0), Announced(2, 5, 20.0), others=(1, 2, 3))
    feed(barrier, *arrival(3, 5))
    assert barrier.wake_at == 2 * 50.0 + GRACE
    assert barrier.step(Tick(45.0)) == []
    assert Train(6, (3,), missing=(1, 2)) in barrier.step(Tick(105.0))


def test_a_deadline_passes_only_with_a_quorum() -> None:
    barrier = running(5)
    assert barrier.step(Tick(1000.0)) == []
    assert barrier.wake_at is None  # time alone changes nothing any more
    assert trains(feed(barrier, *arrival(2, 5))) == [Train(6, (2,), missing=(1,))]


def test_a_peer_that_has_gone_on_is_present_without_its_snapshot() -> None:
    barrier = running(5, Announced(1, 6))
    assert Train(6, (), missing=(1, 2)) in barrier.step(Tick(25.0))


def test_a_peer_that_only_says_that_it_has_published_is_not_present() -> None:
    barrier = running(5, Announced(1, 5), ManifestHeld(1, 5))
    assert barrier.step(Tick(1000.0)) == []


def test_a_refused_snapshot_makes_its_peer_present() -> None:
    barrier = running(5, Announced(1, 5), ManifestHeld(1, 5), SnapshotRefused(1, 5))
    assert Train(6, (), quarantined=(1,), missing=(2,)) in barrier.step(Tick(25.0))


def test_where_nobody_teaches_the_manifest_makes_a_peer_present() -> None:
    barrier = running(5, Announced(1, 5), ManifestHeld(1, 5), teachers=())
    assert Train(6, ()) in barrier.step(Tick(25.0))


def test_more_than_the_least_quorum_may_be_asked_for() -> None:
    barrier = running(5, *arrival(1, 5), least=3)
    assert barrier.step(Tick(1000.0)) == []
    assert trains(feed(barrier, *arrival(2, 5))) == [Train(6, (1, 2))]


def test_one_deadline_is_paid_once_and_the_peer_is_waited_for_again_after_it_was_heard_of() -> None:
    barrier = running(5, *arrival(1, 5))
    assert trains(barrier.step(Tick(25.0))) != []
    feed(barrier, Tick(30.0), Published(6, 5.0))
    assert trains(feed(barrier, *arrival(1, 6))) == [Train(7, (1,), missing=(2,))]  # at once
    feed(barrier, Tick(40.0), Published(7, 5.0), Announced(2, 5))  # too old to count as news
    assert trains(feed(barrier, *arrival(1, 7))) != []
    feed(barrier, Tick(50.0), Published(8, 5.0), Announced(2, 7))  # one behind: it is about to publish 8
    assert trains(feed(barrier, *arrival(1, 8))) == []
    assert barrier.wake_at == 50.0 + 2 * 10.0 + GRACE


@pytest.mark.parametrize("ahead", [0, 1])
def test_who_announces_and_does_not_deliver_holds_up_two_rounds_and_not_all(ahead: int) -> None:
    """Peer 2 says in every round that it has published, also too early, and nothing of it ever comes."""
    barrier = running(2, Announced(2, 2 + ahead), ManifestHeld(2, 2), *arrival(1, 2))
    now, waited = 0.0, []
    for number in range(2, 7):
        waited += [not barrier.state.chosen]
        now += 25.0
        feed(barrier, Tick(now))
        feed(barrier, Published(number + 1, 5.0), Announced(2, number + 1 + ahead), ManifestHeld(2, number + 1))
        feed(barrier, *arrival(1, number + 1))
    assert waited == [True, True, False, False, False]
    feed(barrier, SnapshotHeld(2, 7), Published(8, 5.0), Announced(2, 8), *arrival(1, 8))
    assert not barrier.state.chosen  # something has come: it is waited for


@pytest.mark.parametrize(("number", "is_waited_for"), [(4, False), (5, False), (6, True), (7, True)])
@pytest.mark.parametrize("teachers", [OTHERS, ()])
def test_only_what_is_new_enough_brings_a_peer_back(
    number: int, is_waited_for: bool, teachers: tuple[int, ...]
) -> None:
    """A transfer of an old round may end long after its peer was given up."""
    barrier = running(5, *arrival(1, 5), Tick(25.0), Published(6, 5.0), teachers=teachers)
    feed(barrier, *arrival(1, 6), Tick(50.0), Published(7, 5.0))
    assert barrier.state.absent == {2}
    # Of one that teaches, a snapshot says so; of one that does not, the manifest.
    late = SnapshotHeld(2, number) if teachers else ManifestHeld(2, number)
    feed(barrier, late, *arrival(1, 7))
    assert (2 in barrier.state.absent) != is_waited_for
    # The manifest of round 7 is all that was missing of one that does not teach.
    assert (barrier.state.chosen is None) == (is_waited_for and (number, teachers) != (7, ()))


def test_who_did_not_keep_its_word_and_then_delivers_is_believed_again() -> None:
    barrier = running(2, *arrival(1, 2), Tick(25.0))  # peer 2 misses round 2
    feed(barrier, Published(3, 5.0), Announced(2, 3), *arrival(1, 3), Tick(50.0))  # is back by its word, and breaks it
    feed(barrier, Published(4, 5.0), Announced(2, 4))
    assert trains(feed(barrier, *arrival(1, 4))) != []  # it is not believed any more
    feed(barrier, Published(5, 5.0), *arrival(2, 5))  # delivers
    feed(barrier, *arrival(1, 5), Tick(75.0), Published(6, 5.0))
    feed(barrier, *arrival(1, 6), Tick(100.0))  # misses once more, as anybody may
    assert barrier.state.absent == {2}
    feed(barrier, Published(7, 5.0), Announced(2, 7), *arrival(1, 7))
    assert barrier.state.chosen is None  # its word counts


def test_old_news_admits_nobody() -> None:
    barrier = running(5, Announced(2, 5), *arrival(1, 5))
    barrier.step(Tick(25.0))
    feed(barrier, Published(6, 5.0), Announced(2, 5))
    assert trains(feed(barrier, *arrival(1, 6))) != []


def test_what_came_late_says_nothing_of_how_long_a_round_takes() -> None:
    barrier = running(5, *arrival(1, 5), Tick(25.0))
    feed(barrier, Tick(500.0), *arrival(2, 5)[:3], Published(6, 5.0), Announced(2, 6))
    assert trains(feed(barrier, *arrival(1, 6))) == []
    assert barrier.wake_at == 500.0 + 2 * 10.0 + GRACE


def test_what_came_in_time_counts() -> None:
    barrier = running(5, Announced(2, 5, 10.0), *arrival(1, 5), Tick(24.0), *arrival(2, 5))
    feed(barrier, Tick(30.0), Published(6, 5.0))
    feed(barrier, *arrival(1, 6))
    assert barrier.wake_at == 30.0 + 2 * 24.0 + GRACE


def test_when_the_others_were_started_says_nothing_of_how_long_a_round_takes() -> None:
    barrier = make()
    feed(barrier, Connected(1), Connected(2), LearnerUp(), Published(0, 2.0), Tick(90.0))
    feed(barrier, *arrival(1, 0, busy=2.0), *arrival(2, 0, busy=2.0), Published(1, 2.0))
    assert barrier.wake_at == 90.0 + 2 * 2.0 + GRACE


def test_nothing_is_known_of_a_peer_after_a_restart() -> None:
    barrier = make(published=5, now=1000.0)
    feed(barrier, Connected(1), LearnerUp())
    assert barrier.wake_at == 1000.0 + START
    feed(barrier, *arrival(1, 5, busy=20.0))
    # One that is away gets as much as any other.
    assert barrier.wake_at == 1000.0 + 2 * 20.0 + GRACE
    # One that is there is waited for as at the start: it has not said anything yet.
    feed(barrier, Connected(2))
    assert barrier.wake_at == 1000.0 + START


def test_what_lies_on_the_disk_says_nothing_of_how_long_a_round_takes() -> None:
    barrier = make(published=5)
    feed(barrier, *(event for peer in OTHERS for event in (ManifestHeld(peer, 5), SnapshotHeld(peer, 5))))
    feed(barrier, Connected(1), Connected(2), LearnerUp(), Tick(3.0), Published(6, 3.0))
    assert barrier.wake_at == START


def test_who_never_says_how_fast_it_is_has_the_start_wait_once() -> None:
    barrier = running(3, *arrival(1, 3))
    barrier.state.times.said.pop(2, None)
    assert barrier._deadline(2) == START
    feed(barrier, Tick(START + 1.0))
    assert barrier.wake_at is None  # its time is over: round 4 has been opened


@pytest.mark.parametrize("lie", [1e9, math.inf])
def test_a_liar_cannot_hold_up_the_mesh_for_long(lie: float) -> None:
    barrier = running(5, *arrival(1, 5), Announced(2, 5, lie))
    assert barrier.wake_at == 2 * 30 * 10.0 + GRACE


def test_the_own_rounds_are_a_measure_too() -> None:
    barrier = make(published=4)
    feed(barrier, Connected(1), LearnerUp(), Published(5, 10.0), Announced(1, 5, 1e9))
    assert barrier.wake_at == 2 * 30 * 10.0 + GRACE
    # Peer 2 is away, and nothing is known of it but that it may be as slow as this one.
    alone = make(published=4)
    feed(alone, LearnerUp(), Published(5, 10.0))
    assert alone.wake_at == 2 * 10.0 + GRACE


def test_time_that_no_peer_can_measure_is_not_believed() -> None:
    barrier = running(5, *arrival(1, 5), Announced(2, 5, math.nan))
    assert barrier.wake_at == 2 * 10.0 + GRACE


# --- stale teachers ---------------------------------------------------------------------------------------------------


def holding(number: int, *, newest: int, model_round: int | None = None, staleness: int = 2) -> Barrier:
    """Round ``number`` is published; of peer 2, which is away for good, a snapshot of ``newest`` is here."""
    barrier = running(newest, *arrival(1, newest), *arrival(2, newest, model_round=model_round), staleness=staleness)
    for each in range(newest + 1, number + 1):
        feed(barrier, Tick(1000.0 * each), Published(each, 10.0))
        if each < number:
            feed(barrier, *arrival(1, each), Tick(1000.0 * each + 900.0))
    return barrier


@pytest.mark.parametrize(
    ("newest", "staleness", "teaches"), [(5, 1, True), (4, 1, False), (4, 2, True), (3, 2, False), (5, 0, False)]
)
def test_a_missing_peer_teaches_with_its_last_snapshot_for_so_many_rounds(
    newest: int, staleness: int, teaches: bool
) -> None:
    barrier = holding(6, newest=newest, staleness=staleness)
    decisions = feed(barrier, *arrival(1, 6), Tick(9000.0), Taught(2, newest, usable=True))
    if teaches:
        assert trains(decisions) == [Train(7, (1, 2), stale=((2, newest),))]
    else:
        assert trains(decisions) == [Train(7, (1,), missing=(2,))]


def test_what_counts_is_the_age_of_the_weights() -> None:
    barrier = holding(6, newest=5, model_round=3)
    decisions = feed(barrier, *arrival(1, 6), Tick(9000.0))
    assert trains(decisions) == [Train(7, (1,), missing=(2,))]


@pytest.mark.parametrize(("model_round", "teaches"), [(4, True), (3, False)])
def test_a_peer_that_is_back_is_a_stale_teacher_or_none(model_round: int, teaches: bool) -> None:
    barrier = running(6, *arrival(1, 6))
    decisions = feed(barrier, *arrival(2, 6, model_round=model_round))
    assert (Teach(2, 6) in decisions) is teaches
    expected = Train(7, (1, 2), stale=((2, 6),)) if teaches else Train(7, (1,), missing=(2,))
    assert trains(decisions) == [expected]


def test_a_snapshot_that_comes_after_the_choice_does_not_teach_in_this_round_but_in_the_next() -> None:
    barrier = holding(6, newest=5)
    assert Teach(2, 5) in feed(barrier, *arrival(1, 6), Tick(9000.0))
    late = feed(barrier, *arrival(2, 6)[:3])
    assert late == [FetchManifest(2, 6), FetchSnapshot(2, 6)]
    assert barrier.step(Taught(2, 5, usable=True)) == [Train(7, (1, 2), stale=((2, 5),))]
    feed(barrier, Tick(9001.0), Published(7, 10.0))
    assert Teach(2, 6) in feed(barrier, *arrival(1, 7), Tick(19000.0))
    assert barrier.step(Taught(2, 6, usable=True)) == [Train(8, (1, 2), stale=((2, 6),))]


def test_a_refusal_after_the_choice_leaves_the_older_snapshot_in_its_place() -> None:
    barrier = holding(6, newest=5)
    feed(barrier, *arrival(1, 6), Tick(9000.0))
    feed(barrier, Announced(2, 6), ManifestHeld(2, 6), SnapshotRefused(2, 6))
    assert barrier.step(Taught(2, 5, usable=True)) == [Train(7, (1, 2), stale=((2, 5),))]


def test_a_refusal_after_the_choice_is_named_where_nothing_older_teaches() -> None:
    barrier = running(6, Announced(2, 6), ManifestHeld(2, 6), *arrival(1, 6)[:3])
    feed(barrier, Tick(9000.0), SnapshotRefused(2, 6))
    assert barrier.step(Taught(1, 6, usable=True)) == [Train(7, (1,), quarantined=(2,))]


def test_an_older_snapshot_does_not_stand_in_for_a_refused_one() -> None:
    barrier = holding(6, newest=5)
    decisions = feed(barrier, Announced(2, 6), ManifestHeld(2, 6), SnapshotRefused(2, 6), *arrival(1, 6))
    assert trains(decisions) == [Train(7, (1,), quarantined=(2,))]


def test_a_stale_teacher_that_the_learner_refuses_is_quarantined() -> None:
    barrier = holding(6, newest=5)
    feed(barrier, *arrival(1, 6), Tick(9000.0))
    assert barrier.step(Taught(2, 5, usable=False)) == [Train(7, (1,), quarantined=(2,))]


def test_a_snapshot_that_was_on_its_way_when_the_round_ended_is_fetched_for_later() -> None:
    barrier = running(5, *arrival(1, 5), Announced(2, 5), ManifestHeld(2, 5), Tick(1000.0))
    assert FetchManifest(2, 5) in barrier.step(Published(6, 10.0))
    assert barrier.step(ManifestHeld(2, 5)) == [FetchSnapshot(2, 5)]
    assert barrier.step(SnapshotHeld(2, 5)) == []
    assert Teach(2, 5) in feed(barrier, *arrival(1, 6), Tick(2000.0))


def test_what_is_too_old_to_teach_is_not_fetched() -> None:
    barrier = make(published=6)
    assert barrier.step(Announced(1, 3)) == []
    assert barrier.step(Announced(1, 4)) == [FetchManifest(1, 4)]
    assert make(published=6, teachers=()).step(Announced(1, 5)) == []  # nobody teaches
    assert make(published=1).step(Announced(1, -1)) == []  # it has nothing yet


def test_a_learner_that_ends_after_the_choice_gets_the_same_teachers_again() -> None:
    barrier = holding(6, newest=5)
    feed(barrier, *arrival(1, 6), Tick(9000.0), *arrival(2, 6)[:3], Taught(2, 5, usable=True))
    feed(barrier, LearnerDown())
    assert barrier.step(LearnerUp()) == [OpenRound(7), Teach(1, 6), Teach(2, 5)]
    assert barrier.step(Taught(2, 6, usable=True)) == []  # not what it was given
    assert barrier.step(Taught(1, 6, usable=True)) == []
    assert barrier.step(Taught(2, 5, usable=True)) == [Train(7, (1, 2), stale=((2, 5),))]


def test_only_teachers_of_the_round_are_taught() -> None:
    barrier = running(5, ManifestHeld(1, 5), SnapshotHeld(1, 5), teachers=(2,))
    assert barrier.state.given == {}
    assert trains(feed(barrier, *arrival(2, 5))) == [Train(6, (2,))]


# --- left behind ------------------------------------------------------------------------------------------------------


def test_a_peer_that_was_left_behind_publishes_its_last_model_as_the_round_of_the_mesh() -> None:
    barrier = running(3, busy=10.0)
    follow(
        barrier,
        [
            (Announced(1, 6), [FetchManifest(1, 3), FetchManifest(1, 6)]),
            (Announced(2, 5), [FetchManifest(2, 3), FetchManifest(2, 5)]),
            (Gone(1, 3), []),
            (ManifestHeld(1, 6), [Rejoin(6)]),
            (ManifestHeld(2, 5), []),
            (Tick(30.0), []),
            (Published(6), [FetchManifest(1, 6), FetchManifest(2, 5)]),
            (ManifestHeld(1, 6), [FetchSnapshot(1, 6)]),
            (SnapshotHeld(1, 6), []),  # the learner has not been given round 6 yet
            (LearnerUp(), [OpenRound(7), Teach(1, 6)]),
            (Announced(2, 6), [FetchManifest(2, 6)]),
            (ManifestHeld(2, 6), [FetchSnapshot(2, 6), Collected(6)]),
            (SnapshotHeld(2, 6), [Teach(2, 6)]),
            (Taught(1, 6, usable=True), []),
            (Taught(2, 6, usable=True), [Train(7, (1, 2))]),
        ],
    )


def test_one_round_is_not_left_behind() -> None:
    barrier = running(3, Announced(1, 4))
    assert barrier.step(ManifestHeld(1, 4)) == []
    assert barrier.state.ahead == {}


def test_who_says_that_it_is_ahead_must_show_it() -> None:
    assert trains(feed(running(3), Announced(1, 6), Tick(1000.0))) == [Train(4, (), missing=(1, 2))]


def test_a_round_beyond_the_last_is_believed_of_nobody() -> None:
    barrier = running(3)
    assert feed(barrier, Announced(1, 10), ManifestHeld(1, 10)) == []
    assert barrier.state.announced[1] == 2
    assert feed(barrier, Announced(1, 9), ManifestHeld(1, 9))[-1] == Rejoin(9)


def test_one_that_claims_a_round_far_ahead_is_followed_only_with_as_many_as_a_round_needs() -> None:
    """Four of seven make a quorum: three beside this peer must have come as far as the round before."""
    barrier = make(published=3, others=tuple(range(1, 7)), least=4, rounds=300)
    feed(barrier, LearnerUp(), *(Connected(j) for j in range(1, 7)))
    assert Rejoin(250) not in feed(barrier, Announced(1, 250), ManifestHeld(1, 250))
    assert Rejoin(250) not in feed(barrier, Announced(2, 249))
    # 1, 2 and 4 have come as far as round 6, and only 1 and 2 as far as 249.
    assert feed(barrier, Announced(4, 7), ManifestHeld(4, 7))[-1] == Rejoin(7)


def test_a_round_that_is_being_trained_is_published_first() -> None:
    barrier = running(3, *arrival(1, 3), *arrival(2, 3))
    assert feed(barrier, Announced(1, 8), ManifestHeld(1, 8)) == [FetchManifest(1, 8)]
    assert "being trained" in barrier.explain()
    assert barrier.step(Published(4, 10.0)) == [Rejoin(8)]


def test_a_round_that_is_being_trained_may_be_enough() -> None:
    barrier = running(3, *arrival(1, 3), *arrival(2, 3), Announced(1, 5), ManifestHeld(1, 5))
    assert Rejoin(5) not in barrier.step(Published(4, 10.0))
    assert barrier.state.ahead == {}


def test_a_learner_that_ends_in_training_leaves_the_peer_behind_at_once() -> None:
    barrier = running(3, *arrival(1, 3), *arrival(2, 3), Announced(1, 8), ManifestHeld(1, 8))
    assert barrier.step(LearnerDown()) == [Rejoin(8)]


def test_nobody_rejoins_before_those_were_met_who_would_know_of_a_lost_round() -> None:
    barrier = make(published=3, others=(1, 2, 3, 4), least=3)
    feed(barrier, LearnerUp(), Connected(1), Announced(1, 6), Announced(2, 5))
    assert barrier.step(ManifestHeld(1, 6)) == []
    assert barrier.explain() == (
        "the mesh went on to round 6 without this peer; it waits until peers 2, 3, 4 have been reached since the start"
    )
    assert barrier.step(Connected(3)) == [Rejoin(6)]
    assert barrier.step(Connected(4)) == []  # once


def test_rejoining_may_take_so_long_that_it_has_to_be_done_again() -> None:
    barrier = running(3, Announced(1, 6), ManifestHeld(1, 6), Announced(1, 8), Tick(90.0))
    assert barrier.step(ManifestHeld(1, 8)) == []
    assert barrier.step(Published(6)) == [Rejoin(8)]
    assert barrier.step(Published(8))[0] == FetchManifest(1, 8)


@pytest.mark.parametrize("number", [3, 5, 7])
def test_only_the_round_of_the_mesh_is_published_out_of_turn(number: int) -> None:
    barrier = running(3, Announced(1, 6), ManifestHeld(1, 6))
    with pytest.raises(ValueError, match=f"round {number} published after round 3"):
        barrier.step(Published(number))


def test_a_peer_may_come_back_in_the_last_round() -> None:
    barrier = running(3, Announced(1, 9), Announced(2, 9))
    assert barrier.step(ManifestHeld(1, 9)) == [Rejoin(9)]
    feed(barrier, Published(9), ManifestHeld(1, 9))
    assert barrier.step(ManifestHeld(2, 9)) == [FetchSnapshot(2, 9), Collected(9)]
    assert feed(barrier, SnapshotHeld(1, 9), SnapshotHeld(2, 9)) == [Release()]
    assert barrier.step(LearnerUp()) == [Finish()]


def test_a_round_that_is_gone_is_not_waited_for() -> None:
    barrier = running(5, *arrival(2, 5), Announced(1, 6))
    assert trains(feed(barrier, Gone(1, 5))) == [Train(6, (2,), missing=(1,))]


def test_a_snapshot_may_be_gone_when_its_manifest_is_here() -> None:
    barrier = running(5, *arrival(2, 5), Announced(1, 6), ManifestHeld(1, 5))
    assert trains(feed(barrier, Gone(1, 5))) == [Train(6, (2,), missing=(1,))]


def test_who_does_not_keep_the_last_round_any_more_has_published_it() -> None:
    barrier = running(5, *arrival(2, 5), Announced(1, 5), Announced(3, 5), others=(1, 2, 3), least=3)
    assert trains(feed(barrier, Gone(1, 5), Tick(25.0))) == [Train(6, (2,), missing=(1, 3))]


@pytest.mark.parametrize("event", [Gone(1, 5), SnapshotRefused(1, 5)])
def test_what_is_known_to_be_gone_or_refused_is_not_asked_for(event: Event) -> None:
    barrier = make(published=5)
    assert feed(barrier, event, ManifestHeld(1, 5), Announced(1, 5)) == []


def test_that_another_round_is_gone_says_nothing_of_this_one() -> None:
    barrier = running(5, *arrival(2, 5), Announced(1, 5))
    assert feed(barrier, Gone(1, 4), Gone(1, 6)) == []
    assert feed(barrier, ManifestHeld(1, 5)) == [FetchSnapshot(1, 5), Collected(5)]


def test_what_is_gone_in_one_round_is_asked_for_in_the_next() -> None:
    barrier = running(5, *arrival(2, 5), Announced(1, 6), Gone(1, 5))
    assert FetchManifest(1, 6) in barrier.step(Published(6, 10.0))


# --- the start --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quorum", "reached", "missing"),
    [
        (None, (), (1, 2, 3, 4)),
        (None, (1, 3), (2, 4)),
        (None, (1, 2, 3, 4), None),
        (Quorum(3, 2, GRACE), (2,), (1, 3, 4)),
        (Quorum(3, 2, GRACE), (2, 4), None),
    ],
)
@pytest.mark.parametrize("published", [-1, 0])
def test_who_reaches_too_few_in_time_gives_up(
    published: int, quorum: Quorum | None, reached: tuple[int, ...], missing: tuple[int, ...] | None
) -> None:
    others = (1, 2, 3, 4)
    barrier = Barrier(others, 9, lambda _: others, published, quorum=quorum, now=50.0, start_wait=START)
    feed(barrier, *(event for peer in reached for event in (Connected(peer), Disconnected(peer))))
    assert barrier.step(Tick(149.9)) == []
    if missing or quorum:
        assert barrier.wake_at == 150.0
    assert barrier.step(Tick(150.0)) == ([GiveUp(missing)] if missing else [])
    assert barrier.step(Tick(151.0)) == []  # once


@pytest.mark.parametrize("quorum", [None, Quorum(2, 2, GRACE)])
def test_after_the_first_round_nobody_gives_up(quorum: Quorum | None) -> None:
    barrier = Barrier(OTHERS, 9, lambda _: OTHERS, 1, quorum=quorum, now=50.0, start_wait=START)
    assert barrier.step(Tick(1000.0)) == []
    barrier = Barrier(OTHERS, 9, lambda _: OTHERS, 0, quorum=quorum, start_wait=START)
    feed(barrier, LearnerUp(), Connected(1), Connected(2), *arrival(1, 0), *arrival(2, 0), Disconnected(1))
    feed(barrier, Published(1))
    assert barrier.step(Tick(1000.0)) == []


def test_those_who_are_there_start_without_the_others() -> None:
    barrier = make(published=0, others=(1, 2, 3, 4), least=3)
    feed(barrier, Connected(2), Connected(3), LearnerUp(), *arrival(2, 0), *arrival(3, 0))
    assert barrier.wake_at == START
    assert trains(barrier.step(Tick(99.0))) == []
    assert trains(barrier.step(Tick(100.0))) == [Train(1, (2, 3), missing=(1, 4))]


@pytest.mark.parametrize("least", [2, 3])
def test_nothing_is_trained_before_enough_have_been_met(least: int) -> None:
    barrier = make(published=5, least=least)
    assert trains(feed(barrier, LearnerUp(), *arrival(1, 5), *arrival(2, 5))) == []
    assert barrier.explain() == ("round 6 waits until peers 1, 2 have been reached since the start")
    assert trains(barrier.step(Connected(2))) == ([Train(6, (1, 2))] if least == 2 else [])
    assert trains(barrier.step(Connected(1))) == ([Train(6, (1, 2))] if least == 3 else [])


def test_under_policy_all_everybody_is_met_before_anything_is_trained() -> None:
    barrier = Barrier(OTHERS, 9, lambda _: OTHERS, 5)
    assert trains(feed(barrier, LearnerUp(), Connected(1), *arrival(1, 5), *arrival(2, 5))) == []
    assert trains(barrier.step(Connected(2))) == [Train(6, (1, 2))]


def test_under_policy_all_time_matters_only_at_the_start() -> None:
    barrier = Barrier(OTHERS, 9, lambda _: OTHERS, 0, now=5.0, start_wait=START)
    assert barrier.wake_at == 105.0
    feed(barrier, LearnerUp(), Connected(1), Connected(2), *arrival(1, 0))
    assert barrier.wake_at is None
    assert barrier.step(Tick(math.inf)) == []
    assert Barrier(OTHERS, 9, lambda _: OTHERS, 1, start_wait=START).wake_at is None
    assert Barrier(OTHERS, 9, lambda _: OTHERS).wake_at is None


def test_there_is_nothing_to_wake_up_for_before_the_first_round_once_all_have_been_met() -> None:
    barrier = make()
    feed(barrier, Connected(1))
    assert barrier.wake_at == START
    feed(barrier, Connected(2))
    assert barrier.wake_at is None
    feed(barrier, LearnerUp(), Published(0))
    assert barrier.wake_at == START


def test_there_is_nothing_to_wake_up_for_after_the_choice() -> None:
    barrier = running(5, *arrival(1, 5), Tick(25.0), Announced(2, 5, 100.0))
    assert barrier.wake_at is None


def test_a_clock_begins_at_zero_where_nothing_else_is_said() -> None:
    assert Barrier(OTHERS, 9, lambda _: OTHERS, start_wait=START).wake_at == START


# --- the end ----------------------------------------------------------------------------------------------------------


def test_the_last_round_of_a_peer_is_waited_for_until_its_deadline_even_without_a_quorum() -> None:
    barrier = running(9)
    assert barrier.wake_at == 2 * 10.0 + GRACE
    assert barrier.step(Tick(25.0)) == [Collected(9), Release(), Finish()]
    assert barrier.waited_for_at_the_end == OTHERS
    feed(barrier, Disconnected(2))
    assert barrier.waited_for_at_the_end == (1,)
    feed(barrier, Announced(2, 9))  # not away any more
    assert barrier.waited_for_at_the_end == OTHERS


# --- words ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("barrier", "sentence"),
    [
        (running(5), "round 6 waits for round 5 of peers 1, 2; it needs 2 of 3 peers and has 1"),
        (
            running(5, *arrival(1, 5), Disconnected(2)),
            "round 6 waits for round 5 of peer 2 (not connected), 25 s at most; 2 of 3 peers are enough then",
        ),
        (
            running(5, *arrival(1, 5), Announced(2, 5, 100.0), ManifestHeld(2, 5)),
            "round 6 waits for the snapshots of peer 2, 205 s at most; 2 of 3 peers are enough then",
        ),
        (running(5, *arrival(1, 5)[:3], Tick(25.0)), "round 6 waits for the learner to run 1 of 1 teachers"),
        (running(5, *arrival(1, 5), Tick(25.0)), "round 6 is being trained"),
        (
            running(5, *arrival(1, 5), Tick(25.0), Published(6, 10.0)),
            "round 7 waits for round 6 of peer 1; it needs 2 of 3 peers and has 1",
        ),
        (
            running(5, Announced(1, 8), ManifestHeld(1, 8)),
            "the mesh went on without this peer: its last model is published again as round 8",
        ),
        (running(9), "all 9 rounds are done here; waits for the last round of peers 1, 2, 25 s at most"),
        (running(9, *arrival(1, 9), Tick(25.0)), "all 9 rounds are done here and everywhere but at peer 2"),
        (running(9, *arrival(1, 9), *arrival(2, 9)), "all 9 rounds are done here and everywhere"),
    ],
)
def test_explain_says_what_is_waited_for_and_how_long(barrier: Barrier, sentence: str) -> None:
    assert barrier.explain() == sentence


def test_who_was_absent_is_named_only_where_nobody_else_is_waited_for() -> None:
    barrier = running(5, *arrival(1, 5), *arrival(3, 5), Tick(25.0), Published(6, 10.0), others=(1, 2, 3), least=3)
    assert barrier.explain().startswith("round 7 waits for round 6 of peers 1, 3;")
    feed(barrier, *arrival(1, 6))
    feed(barrier, *arrival(3, 6)[:2])
    assert barrier.explain().startswith("round 7 waits for the snapshots of peer 3;")
    barrier.step(SnapshotRefused(3, 6))
    assert barrier.explain() == "round 7 is being trained"


def test_who_was_absent_is_named_where_nobody_else_is_left() -> None:
    barrier = running(5, Announced(1, 6), *arrival(2, 5), Announced(2, 6), others=(1, 2, 3), least=3)
    feed(barrier, *arrival(1, 5), Tick(25.0))  # 3 is absent
    feed(barrier, Published(6, 10.0), ManifestHeld(1, 6), SnapshotHeld(1, 6), Disconnected(2), Disconnected(3))
    assert barrier.explain().startswith("round 7 waits for round 6 of peer 2 (not connected); it needs 3 of 4")
    barrier.step(Tick(90.0))
    assert barrier.explain().startswith("round 7 waits for round 6 of peer 2 (not connected); it needs 3 of 4")
    alone = make(published=5, others=(1,))
    alone.state.absent.add(1)
    assert feed(alone, LearnerUp(), Connected(1)) == [OpenRound(6)]
    assert alone.explain() == "round 6 waits for round 5 of peer 1; it needs 2 of 2 peers and has 1"


def test_the_words_stay_the_same_while_time_passes() -> None:
    barrier = running(5, *arrival(1, 5))
    before = barrier.explain()
    barrier.step(Tick(20.0))
    assert barrier.explain() == before


# --- the rest ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "event",
    [
        Announced(1, 5),
        ManifestHeld(1, 5),
        SnapshotHeld(1, 5),
        SnapshotRefused(2, 4),
        Gone(2, 4),
        Taught(1, 4, usable=True),
        Taught(2, 5, usable=True),
        Connected(1),
        LearnerUp(),
        Tick(0.0),
    ],
)
def test_events_given_twice_or_about_other_rounds_change_nothing(event: Event) -> None:
    barrier = running(5, Announced(2, 5), ManifestHeld(2, 5), *arrival(1, 5))
    before = repr(state_of(barrier))
    assert barrier.step(event) == []
    assert repr(state_of(barrier)) == before


def test_nobody_is_late_before_the_learner_is_there() -> None:
    """After a restart nothing can be fetched until then, however long loading the data takes."""
    barrier = make(published=5)
    feed(barrier, Tick(0.0), *(event for j in (1, 2) for event in (Connected(j), Announced(j, 5, 3.0))))
    assert trains(feed(barrier, Tick(100.0))) == []
    assert feed(barrier, LearnerUp()) == [OpenRound(6)]
    assert trains(feed(barrier, Tick(105.0))) == []
    decisions = feed(barrier, *(event for j in (1, 2) for event in arrival(j, 5)))
    assert trains(decisions) == [Train(6, (1, 2))]


def test_after_a_start_the_speed_of_a_peer_is_known_from_its_old_round() -> None:
    barrier = make(published=5)
    feed(barrier, LearnerUp(), Announced(1, 5), Announced(2, 5), *arrival(1, 5))  # as found on disk
    feed(barrier, Connected(2), Announced(2, 5, 4.0))
    assert barrier.wake_at == 2 * 4.0 + GRACE
    feed(barrier, Announced(2, 5, 40.0))  # said again and again; the first counts
    assert barrier.wake_at == 2 * 4.0 + GRACE
