"""``events.jsonl``: what was recorded replays to the same decisions, and what is none is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import peer.recorder
from peer.barrier import Barrier, Quorum, State
from peer.events import (
    Announced,
    Connected,
    Disconnected,
    Event,
    Gone,
    LearnerDown,
    LearnerUp,
    ManifestHeld,
    Published,
    Rejoin,
    SnapshotHeld,
    SnapshotRefused,
    Taught,
    Tick,
    Train,
)
from peer.recorder import FILE, PREVIOUS, Damage, Recorder, Start, Step, read, replay

OTHERS = (1, 2, 3)


def make(published: int = -1, *, quorum: bool = True, start_wait: float = 30.0, now: float = 100.0) -> Barrier:
    """Peer 0 of four; nobody teaches in rounds that a multiple of five names."""
    return Barrier(
        OTHERS,
        50,
        lambda number: OTHERS if number % 5 else (),
        published,
        quorum=Quorum(3, 2, 2.0) if quorum else None,
        now=now,
        start_wait=start_wait,
    )


def feed(recorder: Recorder, barrier: Barrier, now: float, *events: Event) -> None:
    """As the service does."""
    for event in events:
        decisions = barrier.step(Tick(now)) + barrier.step(event)
        recorder.record(now, event, decisions)


def arrival(peer: int, number: int) -> list[Event]:
    held = [ManifestHeld(peer, number), SnapshotHeld(peer, number, number)]
    return [Announced(peer, number, 0.5), *held, Taught(peer, number, usable=True)]


def live(recorder: Recorder, barrier: Barrier, now: float, rounds: Sequence[int], others: Sequence[int]) -> None:
    """Some rounds with some of the others."""
    for number in rounds:
        for j in others:
            feed(recorder, barrier, now + 0.1 * j, *arrival(j, number))
        feed(recorder, barrier, now + 9.0, Tick(now + 9.0))  # the deadline of those who are missing
        given = barrier.state.given.items() - {(j, number) for j in others}
        feed(recorder, barrier, now + 9.2, *(Taught(j, older, usable=True) for j, older in sorted(given)))
        feed(recorder, barrier, now + 9.5, Published(number + 1, 0.75))
        now += 10.0


def a_life(recorder: Recorder, barrier: Barrier) -> None:
    """Some of everything that can happen under policy quorum."""
    feed(recorder, barrier, 100.5, LearnerUp(), Published(0), *(Connected(j) for j in OTHERS))
    live(recorder, barrier, 101.0, range(6), OTHERS)
    feed(recorder, barrier, 161.0, Disconnected(3))
    live(recorder, barrier, 162.0, range(6, 9), (1, 2))
    feed(recorder, barrier, 193.0, LearnerDown(), SnapshotRefused(1, 9), Gone(2, 9), LearnerUp())
    feed(recorder, barrier, 194.0, Announced(1, 20), Announced(2, 19), ManifestHeld(1, 20), Published(20), LearnerUp())
    live(recorder, barrier, 195.0, range(20, 23), OTHERS)


def assert_replays(path: Path) -> list[Step]:
    steps = list(replay(path))
    assert [step for step in steps if not step.agrees] == []
    return steps


# --- what replays -----------------------------------------------------------------------------------------------------


def test_a_recording_replays_to_the_same_decisions(tmp_path: Path) -> None:
    barrier = make()
    recorder = Recorder(tmp_path, barrier)
    a_life(recorder, barrier)
    recorder.close()
    steps = assert_replays(tmp_path / FILE)
    said = [decision["is"] for step in steps for decision in step.replayed]
    assert {"MakeInitialModel", "OpenRound", "FetchManifest", "FetchSnapshot", "Teach", "Train", "Rejoin"} <= {*said}
    trained = [decision for step in steps for decision in step.replayed if decision["is"] == "Train"]
    assert any(each["stale"] for each in trained)
    assert any(each["missing"] for each in trained)
    assert [step.line for step in steps] == list(range(2, len(steps) + 2))
    assert (steps[-1].now, steps[-1].event) == (224.5, Published(23, 0.75))
    assert steps[-1].explanation == barrier.explain()


def test_policy_all_replays_too(tmp_path: Path) -> None:
    barrier = make(quorum=False)
    recorder = Recorder(tmp_path, barrier)
    feed(recorder, barrier, 100.5, LearnerUp(), Published(0), *(Connected(j) for j in OTHERS))
    live(recorder, barrier, 101.0, range(6), OTHERS)
    recorder.close()
    trained = [d for step in assert_replays(tmp_path / FILE) for d in step.replayed if d["is"] == "Train"]
    assert [each["round"] for each in trained] == [1, 2, 3, 4, 5, 6]
    assert [bool(each["teachers"]) for each in trained] == [True, True, True, True, False, True]


def test_a_restart_goes_on_in_the_same_file(tmp_path: Path) -> None:
    for published, now in ((-1, 100.0), (3, 5.0), (3, 50.0)):
        barrier = make(published, now=now)
        recorder = Recorder(tmp_path, barrier)
        first = Published(0) if published < 0 else Connected(1)
        feed(recorder, barrier, now + 1, LearnerUp(), first, *(Connected(j) for j in OTHERS))
        feed(recorder, barrier, now + 2, *arrival(1, published))
        recorder.close()
    steps = assert_replays(tmp_path / FILE)
    assert len(steps) == 3 * 9
    starts = [line for line in (tmp_path / FILE).read_text().splitlines() if line.startswith('{"start"')]
    assert [json.loads(line)["start"]["state"]["published"] for line in starts] == [-1, 3, 3]


@pytest.mark.parametrize("cut", [1, 30])
def test_half_a_last_line_is_left_out(tmp_path: Path, cut: int) -> None:
    """Its writer was killed."""
    barrier = make()
    recorder = Recorder(tmp_path, barrier)
    a_life(recorder, barrier)
    recorder.close()
    path = tmp_path / FILE
    whole = assert_replays(path)
    path.write_bytes(path.read_bytes()[: -1 - cut])
    assert assert_replays(path) == whole[:-1]

    barrier = make(23)  # the next start: the half line stays where it is
    recorder = Recorder(tmp_path, barrier)
    feed(recorder, barrier, 1.0, LearnerUp())
    recorder.close()
    assert [step.event for step in assert_replays(path)] == [*(step.event for step in whole[:-1]), LearnerUp()]


def test_a_last_line_that_lacks_only_its_end_is_whole(tmp_path: Path) -> None:
    barrier = make()
    recorder = Recorder(tmp_path, barrier)
    feed(recorder, barrier, 101.0, LearnerUp(), Published(0))
    recorder.close()
    path = tmp_path / FILE
    path.write_bytes(path.read_bytes().removesuffix(b"\n"))
    recorder = Recorder(tmp_path, make(0))
    recorder.close()
    assert [step.event for step in assert_replays(path)] == [LearnerUp(), Published(0)]


@pytest.mark.parametrize("start_wait", [math.inf, 30.0])
def test_a_state_with_infinities_is_the_same_after_json(tmp_path: Path, start_wait: float) -> None:
    barrier = make(start_wait=start_wait)
    Recorder(tmp_path, barrier).close()
    (line,) = (tmp_path / FILE).read_text().splitlines()
    state = peer.recorder._STATE.validate_python(json.loads(line)["start"]["state"])
    assert state == barrier.state
    assert state.start_until == 100.0 + start_wait
    barrier = make(start_wait=start_wait)
    recorder = Recorder(tmp_path, barrier)
    feed(recorder, barrier, 131.0, LearnerUp(), Tick(131.0))
    recorder.close()
    given_up = [d for step in assert_replays(tmp_path / FILE) for d in step.replayed if d["is"] == "GiveUp"]
    assert bool(given_up) is (start_wait < math.inf)


def test_a_state_in_the_midst_of_things_is_the_same_after_json(tmp_path: Path) -> None:
    """Every field, in a state in which hardly one has its default."""
    barrier = make()
    recorder = Recorder(tmp_path, barrier)
    a_life(recorder, barrier)
    feed(recorder, barrier, 240.0, *arrival(1, 23), SnapshotRefused(2, 23), Gone(3, 23), Announced(2, 22))
    recorder.close()
    (tmp_path / FILE).unlink()
    Recorder(tmp_path, barrier).close()
    (line,) = (tmp_path / FILE).read_text().splitlines()
    found = peer.recorder._STATE.validate_python(json.loads(line)["start"]["state"])
    assert found == barrier.state
    fresh = vars(State(23, {}, 0.0))
    touched = {name for name, value in vars(barrier.state).items() if value != fresh[name]}
    assert {"announced", "connected", "greeted", "newest", "times", "snapshots", "refused", "asked", "given"} <= touched


# --- size -------------------------------------------------------------------------------------------------------------


def test_at_the_limit_a_new_file_begins_and_two_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    most = 8192
    monkeypatch.setattr(peer.recorder, "_MOST", most)
    barrier = make()
    recorder = Recorder(tmp_path, barrier)
    feed(recorder, barrier, 100.5, LearnerUp(), Published(0), *(Connected(j) for j in OTHERS))
    for number in range(40):
        live(recorder, barrier, 101.0 + 10 * number, [number], OTHERS)
        assert {path.name for path in tmp_path.iterdir()} <= {FILE, PREVIOUS}
        assert all(path.stat().st_size < most + 4096 for path in tmp_path.iterdir())
    recorder.close()
    previous, current = assert_replays(tmp_path / PREVIOUS), assert_replays(tmp_path / FILE)
    assert previous[-1].now <= current[0].now
    published = [step.event.round for step in previous + current if isinstance(step.event, Published)]
    assert published == list(range(published[0], 41))  # no event between the files is lost
    assert current[-1].explanation == barrier.explain()


def test_a_peer_that_waits_for_days_does_not_fill_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """States are told again every few seconds, also where no round is ever published."""
    most = 8192
    monkeypatch.setattr(peer.recorder, "_MOST", most)
    barrier = make()
    recorder = Recorder(tmp_path, barrier)
    feed(recorder, barrier, 100.5, LearnerUp(), Published(0))
    for beat in range(500):
        feed(recorder, barrier, 101.0 + 10 * beat, Connected(1), Announced(1, 0), Disconnected(1))
    recorder.close()
    assert all(path.stat().st_size < most + 4096 for path in tmp_path.iterdir())
    assert len(assert_replays(tmp_path / PREVIOUS)) + len(assert_replays(tmp_path / FILE)) > 30


def test_a_start_on_a_full_file_begins_a_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    barrier = make()
    recorder = Recorder(tmp_path, barrier)
    a_life(recorder, barrier)
    recorder.close()
    before = (tmp_path / FILE).read_text()
    monkeypatch.setattr(peer.recorder, "_MOST", len(before) - 1)
    Recorder(tmp_path, make(23)).close()
    assert (tmp_path / PREVIOUS).read_text() == before
    assert len((tmp_path / FILE).read_text().splitlines()) == 1


# --- what does not replay ---------------------------------------------------------------------------------------------


def recording(tmp_path: Path) -> tuple[Path, list[str]]:
    barrier = make()
    recorder = Recorder(tmp_path, barrier)
    a_life(recorder, barrier)
    recorder.close()
    return tmp_path / FILE, (tmp_path / FILE).read_text().splitlines()


def change(line: str, edit: Callable[[dict[str, Any]], None]) -> str:
    tree = json.loads(line)
    edit(tree)
    return json.dumps(tree)


def test_a_decision_that_would_be_another_today_is_noticed(tmp_path: Path) -> None:
    path, lines = recording(tmp_path)
    at = next(i for i, line in enumerate(lines) if '"is": "Train"' in line)

    def edit(tree: dict[str, Any]) -> None:
        tree["decisions"][-1]["teachers"] = [1, 2]

    path.write_text("\n".join([*lines[:at], change(lines[at], edit), *lines[at + 1 :]]) + "\n")
    (changed,) = [step for step in replay(path) if not step.agrees]
    assert changed.line == at + 1
    assert changed.recorded[-1]["teachers"] == [1, 2]
    assert changed.replayed[-1]["teachers"] == [1, 2, 3]


def test_an_event_that_is_missing_is_noticed(tmp_path: Path) -> None:
    path, lines = recording(tmp_path)
    at = next(i for i, line in enumerate(lines) if '"is": "Taught"' in line)
    path.write_text("\n".join(lines[:at] + lines[at + 1 :]) + "\n")
    assert not all(step.agrees for step in replay(path))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ("{", "not JSON"),
        ("", None),  # an empty line says nothing
        ("[]", "not of a recording"),
        ("5", "not of a recording"),
        ("null", "not of a recording"),
        pytest.param("[" * 100_000, "not JSON", id="nested"),
        ("{}", "not of a recording"),
        ('{"start": 5}', "not of a recording"),
        ('{"start": {"state": {}}}', "not of a recording"),
        ('{"now": 1.0, "event": {"is": "Flood"}, "decisions": []}', "not of a recording.*Flood"),
        ('{"now": 1.0, "event": {"is": "Tick"}, "decisions": []}', "not of a recording.*Tick"),
        ('{"now": 1.0, "event": {"is": "Gone", "peer": 1, "round": 2, "x": 3}, "decisions": []}', "not of a recording"),
        ('{"now": 1.0, "event": {"is": "Announced", "peer": 9, "round": 2}, "decisions": []}', "not of a recording"),
        ('{"now": 1.0, "event": "Tick", "decisions": []}', "not of a recording"),
        ('{"now": 1.0, "event": {"is": "LearnerUp"}}', "not of a recording"),
        ('{"now": "soon", "event": {"is": "LearnerUp"}, "decisions": []}', "not of a recording"),
        ('{"now": 1.0, "event": {"is": "Published", "round": 24}, "decisions": []}', "not of a recording"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, damage: str, reason: str | None) -> None:
    path, lines = recording(tmp_path)
    path.write_text("\n".join([*lines[:9], damage, *lines[9:]]) + "\n")
    if reason is None:
        assert_replays(path)
        return
    with pytest.raises(ValueError, match=rf"^line 10 is {reason}"):
        list(replay(path))


@pytest.mark.parametrize("damage", ["{", "[]", '{"now": 1e99, "event": {"is": "LearnerUp"}, "decisions": []}'])
@pytest.mark.parametrize("at", [0, 9])  # a start, and an event
def test_after_a_damaged_line_reading_goes_on_at_the_next_start(tmp_path: Path, damage: str, at: int) -> None:
    path, first = recording(tmp_path)
    barrier = make(23)
    recorder = Recorder(tmp_path, barrier)
    feed(recorder, barrier, 1.0, LearnerUp(), Connected(1))
    recorder.close()
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:at], damage, *lines[at + 1 :]]) + "\n")
    items = list(read(path))
    kinds = [Start, *[Step] * (at - 1)] if at else []
    assert [type(item) for item in items] == [*kinds, Damage, Start, Step, Step]
    assert [item.line for item in items] == [*range(1, at + 2), *range(len(first) + 1, len(lines) + 1)]
    assert all(item.agrees for item in items if isinstance(item, Step))
    with pytest.raises(ValueError, match=f"^line {at + 1} is not"):
        list(replay(path))


def test_a_new_file_is_told_from_a_start_of_the_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer.recorder, "_MOST", 8192)
    for published in (-1, 23):
        barrier = make(published)
        recorder = Recorder(tmp_path, barrier)
        if published < 0:
            a_life(recorder, barrier)
        recorder.close()
    starts = [item for item in read(tmp_path / FILE) if isinstance(item, Start)]
    assert [start.continues for start in starts] == [True, False]
    assert 0 <= starts[1].time - starts[0].time < 60


def test_a_damaged_number_of_rounds_does_not_keep_a_replay_busy(tmp_path: Path) -> None:
    path, lines = recording(tmp_path)
    tree = json.loads(lines[0])
    tree["start"]["rounds"] = 10**30
    path.write_text("\n".join([json.dumps(tree), *lines[1:]]) + "\n")
    with pytest.raises(ValueError, match=r"^line 1 is not of a recording: 10+ rounds"):
        list(replay(path))


def test_a_file_that_is_no_recording_is_refused(tmp_path: Path) -> None:
    path = tmp_path / FILE
    _, lines = recording(tmp_path)
    path.write_text(lines[1] + "\n")
    with pytest.raises(ValueError, match="line 1 is not of a recording: the file does not begin with a start"):
        list(replay(path))
    path.write_bytes(b"\x89PNG\r\n\x1a\n\xff\xfe")
    with pytest.raises(ValueError, match="line 1 is not JSON"):
        list(replay(path))
    path.write_bytes(b"")
    assert list(replay(path)) == []


def test_the_recordings_of_these_tests_have_all_kinds_of_events(tmp_path: Path) -> None:
    path, _ = recording(tmp_path)
    kinds = {type(step.event) for step in replay(path)}
    assert {Announced, Connected, Disconnected, Gone, LearnerDown, LearnerUp, ManifestHeld, Published} <= kinds
    assert {SnapshotHeld, SnapshotRefused, Taught, Tick} <= kinds
    decisions = {decision["is"] for step in replay(path) for decision in step.recorded}
    assert {Rejoin.__name__, Train.__name__} <= decisions
