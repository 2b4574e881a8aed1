"""What the log says of calls that are refused: every new stranger once, with address and advice, and no flood."""

from __future__ import annotations

from pathlib import Path

import pytest

from peer.quiet import Quiet
from peer.refusals import Refusals
from peer.words import address_in


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def stranger(refusals: Refusals, address: str, who: str = "an unknown caller") -> None:
    refusals.add_stranger(who, address, "certificate", "is for another federation", "ask that site")


def test_a_stranger_is_said_with_address_and_advice(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    refusals = Refusals(clock=clock)
    stranger(refusals, "10.0.0.7:41000")
    assert caplog.messages == [
        "refused a call of an unknown caller at 10.0.0.7:41000: certificate (is for another federation); ask that site"
    ]
    assert refusals.addresses == {("an unknown caller", "certificate"): "10.0.0.7:41000"}


def test_the_same_stranger_is_said_again_after_minutes_and_ever_more_rarely(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    refusals = Refusals(clock=clock)
    for _ in range(3600):
        stranger(refusals, f"10.0.0.7:{40_000 + int(clock.now) % 1000}")  # another port each time
        clock.now += 1
    assert [text.partition(" by now")[0].rpartition(" ")[2] for text in caplog.messages[1:]] == ["301", "901", "2,101"]
    stranger(refusals, "10.0.0.8:41000")
    assert "10.0.0.8" in caplog.messages[-1]
    assert refusals.counts == {("an unknown caller", "certificate"): 3601}


def test_strangers_from_everywhere_are_few_lines_and_little_memory(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    refusals = Refusals(clock=clock)
    for number in range(10_000):
        stranger(refusals, f"[2001:db8::{number:x}]:41000")
        stranger(refusals, "10.0.0.7:1", who=f"peer {number}")
    assert len(caplog.messages) <= 201
    assert len(refusals.counts) <= 201
    assert len(refusals.addresses) <= 201
    assert refusals.total() == 20_000


def test_what_is_remembered_makes_room_when_it_is_over(clock: Clock) -> None:
    quiet = Quiet(clock, most=2)
    assert [quiet.may_speak(name) for name in "abcda"] == [True, True, True, False, False]  # c and d are the rest
    clock.now += 601
    assert quiet.may_speak("d")
    assert not quiet.may_speak("d")


def test_what_is_counted_elsewhere_is_said_when_it_lasts(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """Also a connection of a peer that is about to make a call has not made one yet."""
    refusals, numbers = Refusals(tmp_path / "refused.txt", clock=clock), iter([0, 1, 0, 0, 1, 0, 0, 1, 3, 2, *[5] * 5])
    refusals.measure("an unknown caller", "connected and made no call", lambda: next(numbers), "see who that is")
    for _ in range(7):
        refusals.save()
    assert not caplog.messages
    for _ in range(3):
        refusals.save()
    assert caplog.messages == ["an unknown caller connected and made no call, once: see who that is"]
    assert (tmp_path / "refused.txt").read_text() == "         2  an unknown caller: connected and made no call\n"
    for _ in range(3):
        refusals.save()
    assert len(caplog.messages) == 1
    clock.now += 301
    refusals.save()
    assert caplog.messages[1:] == ["an unknown caller connected and made no call, 5 times by now: see who that is"]
    clock.now += 10_000
    refusals.save()
    assert len(caplog.messages) == 2  # nothing new


@pytest.mark.parametrize(
    ("connection", "address"),
    [
        ("ipv4:10.0.0.7:41236", "10.0.0.7:41236"),
        ("ipv6:%5B2001:db8::1%5D:41236", "[2001:db8::1]:41236"),
        ("unix:/tmp/socket", "unix:/tmp/socket"),
        ("ipv4:\x1b[31m", "\\x1b[31m"),
    ],
)
def test_addresses_as_grpc_names_them(connection: str, address: str) -> None:
    assert address_in(connection) == address
