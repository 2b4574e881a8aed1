"""All interleavings of a few barriers, and planted faults that this must find."""

from __future__ import annotations

from typing import Any

import pytest
from barrier_model import ModelChecker, ViolationError
from planted_faults import (
    CreditingBarrier,
    DeafBarrier,
    ForgetfulBarrier,
    HastyBarrier,
    LeapingBarrier,
    LenientBarrier,
    PatientBarrier,
    SelfishBarrier,
)

from peer.barrier import Quorum

#: Two of three peers go on; what is one round too old may teach.
TWO = Quorum(min=2, max_staleness=1, grace=0.0)
#: The world of a quorum is wide; it begins after round 0, and whose fetches come in every order is cut down.
QUORUM: dict[str, Any] = {"quorum": TWO, "brief": True, "crashes": (0, 0, 0)}


# --- policy all -------------------------------------------------------------------------------------------------------


def test_three_peers_in_every_interleaving_with_crashes() -> None:
    assert ModelChecker().run() > 100_000


def test_two_peers_in_every_interleaving_with_more_rounds_and_crashes() -> None:
    assert ModelChecker(peers=2, rounds=4, crashes=(3, 3)).run() > 3_000


def test_peers_that_do_not_teach_keep_the_distance_too() -> None:
    assert ModelChecker(teaching=()).run() > 5_000


def test_a_disk_that_is_rolled_back_does_no_harm_if_its_peer_is_given_its_rounds_back() -> None:
    assert ModelChecker(crashes=(0, 0, 0), rollbacks=(1, 0, 0)).run() > 40_000
    assert ModelChecker(peers=2, rounds=4, crashes=(2, 0), rollbacks=(2, 0)).run() > 1_000


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ({"barrier": HastyBarrier}, "without all the others"),
        ({"barrier": HastyBarrier, "teaching": ()}, "more than one round apart"),
        ({"barrier": DeafBarrier, "teaching": ()}, "more than one round apart"),
        ({"barrier": ForgetfulBarrier, "rounds": 1, "crashes": (0, 0, 0)}, "worlds cannot finish"),
        ({"keeps": 1}, "round 0 is needed of a peer that keeps 1:"),
        ({"shows_first": True}, "more than one round apart"),
        ({"crashes": (0, 0, 0), "rollbacks": (1, 0, 0), "guarded": False}, "more than one round apart"),
    ],
    ids=[
        "goes on without a teacher",
        "goes on without one",
        "a peer not waited for",
        "a snapshot forgotten",
        "keeps only round P",
        "visible first",
        "disk rolled back",
    ],
)
def test_the_check_finds_planted_faults(fault: dict[str, Any], expected: str) -> None:
    with pytest.raises(ViolationError, match=expected):
        ModelChecker(**fault).run()


# --- partial participation --------------------------------------------------------------------------------------------

#: Rounds of peers 0 and 1, 1 and 2, 1 and 2 again.
PARTIAL: dict[str, Any] = {"active": 2, "draw": 5, "rounds": 3, "crashes": (0, 0, 0)}


def test_two_of_three_peers_a_round_in_every_interleaving_with_a_crash() -> None:
    assert ModelChecker(**PARTIAL | {"crashes": (1, 0, 0), "draw": 0}).run() > 3_000


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ({"barrier": SelfishBarrier}, "more than one round apart"),
        ({"barrier": SelfishBarrier, "measured": False}, "round 0 is needed of a peer that keeps 2:"),
        ({"keeps": 1}, "round 0 is needed of a peer that keeps 1:"),
        ({"barrier": DeafBarrier, "teaching": ()}, "more than one round apart"),
    ],
    ids=["runs ahead", "deletes what is needed", "keeps only the last", "a peer not waited for"],
)
def test_the_check_finds_planted_faults_of_partial_participation(fault: dict[str, Any], expected: str) -> None:
    with pytest.raises(ViolationError, match=expected):
        ModelChecker(**PARTIAL | fault).run()


# --- policy quorum ----------------------------------------------------------------------------------------------------


def test_three_peers_with_a_quorum_of_two_and_a_crash() -> None:
    assert ModelChecker(**QUORUM | {"crashes": (1, 0, 0), "teaching": ()}).run() > 50_000


def test_a_teacher_that_may_be_stale() -> None:
    assert ModelChecker(**QUORUM, teaching=(2,)).run() > 150_000


def test_a_teacher_that_crashes() -> None:
    assert ModelChecker(**QUORUM | {"crashes": (0, 0, 1), "rounds": 1}, teaching=(2,)).run() > 30_000


def test_two_peers_of_two_are_all_peers() -> None:
    both = ModelChecker(**QUORUM | {"peers": 2, "rounds": 4, "crashes": (1, 1)})
    assert both.run() > 1_000


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ({"quorum": Quorum(1, 1, 0.0)}, "without a majority"),
        ({"quorum": Quorum(1, 1, 0.0), "peers": 2}, "without a majority"),
        ({"barrier": CreditingBarrier}, "without a majority"),
        ({"barrier": LeapingBarrier}, "Rejoin"),
        ({"barrier": PatientBarrier}, "worlds cannot finish without"),
        ({"barrier": LenientBarrier, "quorum": Quorum(2, 0, 0.0), "teaching": (2,)}, "teachers too old"),
    ],
    ids=["less than half", "half", "counts the absent", "leaps", "no deadline", "anything old teaches"],
)
def test_the_check_finds_planted_faults_of_a_quorum(fault: dict[str, Any], expected: str) -> None:
    with pytest.raises(ViolationError, match=expected):
        ModelChecker(**QUORUM | {"teaching": ()} | fault).run()
