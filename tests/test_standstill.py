"""What is said when nothing changes: how loud, how often, and with what stands in the way."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
from processes import Peers, doctored, free_port

from peer.standstill import LONG, Standstill, Way
from peer.words import in_time, is_cut_off

WAITS = "round 1 waits for round 0 of peer 1 (not connected)"
#: For the log.
IMPATIENT = doctored(
    "import peer.exchange, peer.node, peer.standstill, peer.status, peer.cli; peer.status._HEARTBEAT = 0.3; "
    "peer.exchange.LONG = peer.node.LONG = peer.standstill.LONG = 3; peer.cli.main()"
)
#: Pauses for an hour after an attempt to connect.
PATIENT = doctored(
    "import peer.link, peer.attempts, peer.cli; peer.attempts._FIRST = 3600.0; "
    "peer.link.between_tries = lambda members: 3600.0; peer.cli.main()"
)


class Watched:
    """A standstill, and the time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.standstill = Standstill("peers.yaml", lambda: self.now)

    def at(self, seconds: float, explanation: str, way: Way, *, waits: bool = True) -> list[tuple[int, str]]:
        self.now = seconds
        return list(self.standstill.look(explanation, [1] if waits else [], {1: way}))


def test_what_stands_in_the_way_is_said_with_its_address_and_ever_more_rarely() -> None:
    watched, way = Watched(), Way("b.example:7400", 0.0, "unavailable (Connection refused)")
    assert watched.at(0, WAITS, way) == watched.at(LONG - 1, WAITS, way) == []
    said = f"no change for 30 s: {WAITS}; peer 1 at b.example:7400: unavailable (Connection refused)"
    assert watched.at(LONG, WAITS, way) == [(logging.WARNING, said)]
    assert watched.at(LONG + 299, WAITS, way) == []
    [(level, again)] = watched.at(LONG + 300, WAITS, way)
    assert (level, again[:24]) == (logging.WARNING, "no change for 6 min: rou")
    assert watched.at(LONG + 899, WAITS, way) == []
    assert watched.at(LONG + 900, WAITS, way)
    assert watched.at(LONG + 901, "round 1 is being trained", way, waits=False) == []


@pytest.mark.parametrize(
    ("way", "level", "tail"),
    [
        (Way("b:1", None, is_busy=True, says="round 0 is being trained"), logging.INFO, ""),
        (
            Way("b:1", None, says="round 1 waits for round 0 of peer 0 (not connected)"),
            logging.WARNING,
            "; peer 1 says: round 1 waits for round 0 of peer 0 (not connected)",
        ),
        (Way("b:1", None), logging.WARNING, ""),
        (Way("b:1", 0.0), logging.WARNING, "; peer 1 at b:1: no connection yet"),
    ],
)
def test_only_a_peer_that_works_is_waited_for_without_a_warning(way: Way, level: int, tail: str) -> None:
    watched = Watched()
    watched.at(0, "round 1 waits for round 0 of peer 1", way)
    said = f"no change for 30 s: round 1 waits for round 0 of peer 1{tail}"
    assert watched.at(LONG, "round 1 waits for round 0 of peer 1", way) == [(level, said)]


def test_what_stops_being_harmless_is_a_warning_at_once() -> None:
    watched = Watched()
    busy, idle = Way("b:1", None, is_busy=True), Way("b:1", None, says="round 2 waits for peer 3")
    watched.at(0, "round 1 waits for round 0 of peer 1", busy)
    assert [level for level, _ in watched.at(LONG, "round 1 waits for round 0 of peer 1", busy)] == [logging.INFO]
    assert [level for level, _ in watched.at(LONG + 3, "round 1 waits for round 0 of peer 1", idle)] == [
        logging.WARNING
    ]
    assert watched.at(LONG + 6, "round 1 waits for round 0 of peer 1", idle) == []


def test_what_concerns_nobody_else_is_no_warning() -> None:
    watched, way = Watched(), Way("b:1", None)
    watched.at(0, "the learner process is starting", way, waits=False)
    [(level, said)] = watched.at(LONG, "the learner process is starting", way, waits=False)
    assert (level, said) == (logging.INFO, "no change for 30 s: the learner process is starting")


def test_a_peer_that_calls_here_and_is_not_reached() -> None:
    watched = Watched()
    way = Way("b.example:7400", -1000.0, "unavailable (Connection refused)", calls_since=0.0)
    assert watched.at(LONG - 1, "x", way, waits=False) == []  # it has started just now, perhaps
    [(level, said)] = watched.at(LONG, "y", way, waits=False)
    assert level == logging.WARNING
    assert said == (
        "peer 1 calls here, and has not been reached at b.example:7400 for 30 s (unavailable (Connection refused)): "
        "see to its address in peers.yaml, and to the firewalls between"
    )
    assert watched.at(LONG + 1, "z", way, waits=False) == []
    assert watched.at(LONG + 400, "a", way, waits=False)


def test_words() -> None:
    assert [in_time(each) for each in (30, 119, 330, 7_200, 200_000)] == ["30 s", "119 s", "6 min", "2 h", "2 days"]
    assert is_cut_off(WAITS)
    assert is_cut_off("round 1 waits until peer 2 has been reached since the start")
    assert not is_cut_off("round 1 waits for round 0 of peer 1")


def test_a_wrong_port_in_one_file_is_in_both_logs(mesh: Callable[..., Peers]) -> None:
    peers = mesh(2)
    wrong = free_port()
    zero = peers.start(0, command=IMPATIENT)
    one = peers.start(1, file=peers.write_file(peers.folder / "elsewhere", {0: wrong}), command=IMPATIENT)
    one.says(rf"WARNING peer 0 calls here, and has not been reached at 127\.0\.0\.1:{wrong} .* see to its address in ")
    one.says(
        rf"WARNING no change for .*peer 0 \(not connected\); peer 0 at 127\.0\.0\.1:{wrong}: unavailable \(.*refused"
    )
    zero.says(r"WARNING no change for .*; peer 1 says: .*peer 0 \(not connected\)")


def test_a_peer_that_is_called_by_one_that_starts_calls_it_back_at_once(mesh: Callable[..., Peers]) -> None:
    peers = mesh(2, rounds=1)
    first = peers.start(0, command=PATIENT)
    first.says(r"peer 1 at .*; trying again")
    second = peers.start(1)
    for each in (first, second):
        assert each.ended(30) == 0
