"""Partial participation: the draw, the settings, and what one peer waits for, fetches, keeps and proves."""

from __future__ import annotations

import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from barrier_model import greeted
from lineages import consumed, manifest
from rich.console import Console
from wire import prune

from crad_p2p.errors import ConfigurationError
from crad_p2p.federation import Federation, build_federation
from crad_p2p.manifest import Manifest
from crad_p2p.participation import Part, Schedule
from crad_p2p.results import BestRound, RoundRecord
from crad_p2p.snapshot import CHECKPOINT_FILE, SNAPSHOT_FILE, SnapshotError, TensorSpec
from launch.lineage import Entry, Lineage, Owner, Run, ancestry, audit, misfit
from launch.preflight.here import _check_state
from launch.quick import Quick, federation_of, write_federation
from launch.view import Progress
from peer.barrier import Barrier
from peer.events import (
    Announced,
    Collected,
    Connected,
    Decision,
    Event,
    FetchManifest,
    FetchSnapshot,
    Finish,
    Gone,
    LearnerUp,
    ManifestHeld,
    OpenRound,
    Published,
    Release,
    SnapshotHeld,
    SnapshotRefused,
    Taught,
    Teach,
    Tick,
    Train,
)
from peer.intake import Intake
from peer.node import Node
from peer.recorder import FILE, Recorder, replay
from peer.store import Store

#: Who takes part in rounds 1 to 6 of the federation below; peer 1 not before round 2, and not in 3 and 4.
ACTIVE = [(0, 2), (1, 3), (0, 3), (2, 3), (1, 2), (0, 1)]


def federation(**changes: Any) -> Federation:
    peers = [{"id": i, "address": f"127.0.0.1:{7400 + i}", "arch": "cnn6"} for i in range(4)]
    return build_federation(
        {"federation": "lineage", "rounds": 6, "participation": 2, "peers": peers} | changes, "test"
    )


# --- the draw ---------------------------------------------------------------------------------------------------------


def test_the_draw_is_the_same_everywhere_and_for_ever() -> None:
    assert [federation().active(number) for number in range(1, 7)] == ACTIVE
    assert Schedule(range(20), 1, 1024, 10).active(1) == (0, 2, 4, 5, 8, 13, 14, 15, 18, 19)


def test_everybody_has_part_in_round_0_and_k_in_every_other() -> None:
    drawn = Schedule(range(50), 200, 3, 10)
    assert drawn.active(0) == tuple(range(50))
    assert all(len(set(drawn.active(number))) == 10 for number in range(1, 201))
    often = Counter(peer for number in range(1, 201) for peer in drawn.active(number))
    assert all(20 <= often[peer] <= 65 for peer in range(50)), often  # 40 are expected
    assert drawn.active(1) != Schedule(range(50), 1, 4, 10).active(1)


def test_versions_and_who_needs_them() -> None:
    drawn = federation().schedule
    assert drawn is not None
    assert [drawn.version(1, number) for number in range(7)] == [0, 0, 2, 2, 2, 5, 6]
    assert [drawn.following(1, number) for number in range(7)] == [2, 2, 5, 5, 5, 6, None]
    takers = {(owner, number): [i for i in range(4) if drawn.takes_snapshot(i, owner, number)]
              for owner in range(4) for number in range(7) if drawn.takes_part(owner, number)}  # fmt: skip
    assert takers[1, 0] == [3]  # beside which it trains round 2
    assert takers[1, 2] == [2]
    assert takers[3, 3] == [2]
    assert takers[3, 4] == [2]  # its last one: a copy stays where it was made
    assert takers[1, 6] == [0]
    for (owner, number), them in takers.items():
        following = drawn.following(owner, number)
        teaches = [i for i in range(4) if following and owner in federation().teachers_of(i, following)]
        assert following is None or them == teaches


def test_an_initial_model_from_which_nobody_learns_is_not_copied() -> None:
    drawn = federation(rounds=1).schedule
    assert drawn is not None
    assert not any(drawn.takes_snapshot(i, owner, 0) for owner in (1, 3) for i in range(4))


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"participation": 1},
            "participation: 1 of 4 peers a round; it must be from 2, so that somebody teaches, to 4",
        ),
        ({"participation": 5}, "participation: 5 of 4 peers a round; it must be from 2"),
        ({"participation": "all"}, "'participation': must be a valid integer, found 'all'"),
        ({"barrier": {"policy": "quorum"}}, "participation: 2 with barrier.policy quorum; .* leave out one of the two"),
    ],
)
def test_settings_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        federation(**changes)


def test_it_is_agreed_upon_and_leaves_no_trace_where_it_is_not_used(tmp_path: Path) -> None:
    absent, four = federation(participation=None), federation(participation=4)
    assert "participation" not in absent.agreed()
    assert four.agreed() == absent.agreed() | {"participation": 4}
    assert len({federation().digest(), four.digest(), absent.digest()}) == 3
    for each, is_there in ((absent, False), (four, True)):
        write_federation(each, tmp_path / "peers.yaml")
        assert ("participation" in (tmp_path / "peers.yaml").read_text()) == is_there
    addresses = ["127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"]
    assert federation_of(Quick(participation=2), addresses).participation == 2
    assert Quick(participation=2).given() == ["--participation"]


def test_only_who_has_part_in_a_round_learns_and_teaches() -> None:
    drawn = federation()
    assert [drawn.teachers_of(3, number) for number in range(1, 7)] == [(), (1,), (0,), (2,), (), ()]
    assert federation(method={"warmup_rounds": 3}).teachers_of(3, 3) == ()
    assert [drawn.done_through(1, last) for last in (-1, 0, 2, 5, 6)] == [-1, 1, 4, 5, 6]
    assert [drawn.done_through(3, last) for last in (3, 4)] == [3, 6]  # with its last one it has done all
    assert federation(participation=None).done_through(3, 4) == 4


def test_a_round_is_reported_when_it_is_over_and_not_when_everybody_had_one() -> None:
    said = io.StringIO()
    with Progress(Console(file=said), federation()) as progress:
        for peer in range(4):
            progress.rows[peer].round = 0
        progress.rows[0].round = 1
        progress.updated()
        assert said.getvalue() == ""  # peer 2 is still at it
        progress.rows[2].round = 1
        progress.updated()
    assert said.getvalue().startswith("round 1 of 6: ")


# --- the barrier ------------------------------------------------------------------------------------------------------


def barrier(me: int, published: int = -1) -> Barrier:
    drawn = federation()
    others = [i for i in range(4) if i != me]
    new = Barrier(others, 6, lambda number: drawn.teachers_of(me, number), published, part=drawn.part_of(me))
    return greeted(new)


def feed(of: Barrier, *events: Event) -> list[Decision]:
    return [decision for event in events for decision in of.step(event)]


def manifests(*keys: tuple[int, int]) -> list[Event]:
    return [event for key in keys for event in (Announced(*key), ManifestHeld(*key))]


def test_a_round_of_others_is_passed_when_the_one_before_is_over() -> None:
    idle = barrier(1, published=0)
    decisions = feed(idle, LearnerUp(), *manifests((0, 0), (2, 0), (3, 0)))
    assert [each for each in decisions if not isinstance(each, FetchManifest)] == [
        FetchSnapshot(3, 0),  # needed for round 2
        Collected(0),
        OpenRound(2),
    ]
    assert idle.published == 1
    assert idle.explain() == "round 2 waits for round 1 of peers 0 (not connected), 2 (not connected)"
    decisions = feed(idle, *manifests((0, 1), (2, 1)))
    assert Collected(1) in decisions
    assert not any(isinstance(each, FetchSnapshot) and each.peer in (0, 2) for each in decisions)
    assert "waits for the snapshots of peer 3" in idle.explain()
    assert feed(idle, SnapshotHeld(3, 0)) == [Teach(3, 0)]
    assert feed(idle, Taught(3, 0, usable=True)) == [Train(2, (3,))]
    feed(idle, Published(2), *manifests((3, 2)))
    assert idle.published == 3
    assert idle.explain() == (
        "round 4 is not this peer's, the next is round 5; it waits for round 3 of peers 0 (not connected), 3 (not "
        "connected)"
    )


def test_a_snapshot_that_comes_early_stays_for_the_round_that_needs_it() -> None:
    idle = barrier(1, published=0)
    feed(idle, LearnerUp(), *manifests((0, 0), (2, 0), (3, 0)), SnapshotHeld(3, 0))
    assert idle.teachers_done == (0, 1)
    decisions = feed(idle, *manifests((0, 1), (2, 1)))
    assert FetchSnapshot(3, 0) not in decisions
    assert feed(idle, Taught(3, 0, usable=True)) == [Train(2, (3,))]


def test_a_round_waits_for_the_last_one_even_of_those_that_do_not_teach_it() -> None:
    """So nobody runs ahead, and nobody is asked for what it has deleted."""
    third = barrier(3, published=2)
    feed(third, LearnerUp(), *manifests((0, 1), (2, 1)), SnapshotHeld(0, 1), Taught(0, 1, usable=True))
    assert third.published == 2
    assert third.waited_for == (1,)
    assert feed(third, *manifests((1, 2)))[-1] == Train(3, (0,))


def test_a_snapshot_refused_for_a_later_round_is_named_there_alone() -> None:
    second = barrier(2, published=1)
    events = [*manifests((0, 1), (1, 0), (3, 0)), SnapshotHeld(3, 0)]
    feed(second, LearnerUp(), *events, *manifests((1, 2), (3, 2)), SnapshotRefused(1, 2), *manifests((0, 3), (3, 3)))
    feed(second, SnapshotHeld(3, 3))
    assert feed(second, Taught(3, 3, usable=True)) == [Train(4, (3,))]
    feed(second, Published(4), *manifests((3, 4)))
    assert feed(second, Tick(1.0)) == []
    assert second.state.training
    assert second.teachers == (1,)


def test_at_the_end_all_newest_manifests_and_the_copies_are_here() -> None:
    third = barrier(3, published=4)
    decisions = feed(third, LearnerUp(), *manifests((0, 3), (1, 2), (2, 4), (1, 5), (2, 5)))
    assert third.published == 6
    assert FetchSnapshot(2, 5) not in decisions
    decisions = feed(third, *manifests((0, 6), (1, 6)))
    assert [each for each in decisions if not isinstance(each, FetchManifest)] == [
        Collected(6),
        Release(),
        Finish(),
    ]


def test_the_manifest_of_one_that_has_left_is_asked_for_all_the_same() -> None:
    third = barrier(3, published=4)
    feed(third, LearnerUp(), *manifests((0, 3), (1, 2), (2, 4)))
    assert third.published == 5
    assert FetchManifest(2, 5) in feed(third, Gone(2, 5), Announced(2, 5))


def test_all_peers_in_every_round_is_as_without_participation() -> None:
    drawn = federation(participation=4)
    both = [
        Barrier((1, 2, 3), 6, lambda number: drawn.teachers_of(0, number), part=part)
        for part in (None, drawn.part_of(0))
    ]
    events: list[Event] = [LearnerUp(), *greetings()]
    for number in range(7):
        events.append(Published(number))
        for j in (2, 1, 3):
            events += [*manifests((j, number)), SnapshotHeld(j, number), Taught(j, number, usable=True)]
    for event in events:
        one, other = (each.step(event) for each in both)
        assert one == other
        assert both[0].explain() == both[1].explain()
    assert both[0].state == both[1].state


def greetings() -> list[Event]:
    return [Connected(j) for j in (1, 2, 3)]


def test_a_recording_with_passed_rounds_replays(tmp_path: Path) -> None:
    idle = barrier(1, published=0)
    recorder = Recorder(tmp_path, idle)
    events = [LearnerUp(), *manifests((0, 0), (2, 0), (3, 0)), SnapshotHeld(3, 0), *manifests((0, 1), (2, 1))]
    events += [Taught(3, 0, usable=True), Published(2), *manifests((3, 2)), *manifests((0, 3), (3, 3), (2, 4), (3, 4))]
    for event in events:
        recorder.record(1.0, event, idle.step(Tick(1.0)) + idle.step(event))
    recorder.close()
    assert idle.published == 4
    steps = list(replay(tmp_path / FILE))
    assert all(step.agrees for step in steps)
    assert steps[-1].explanation == idle.explain()
    text = (tmp_path / FILE).read_text()
    (tmp_path / FILE).write_text(text.replace('"active": 2', '"active": 4'))
    assert not all(step.agrees for step in replay(tmp_path / FILE))


# --- what is taken in, kept and proved --------------------------------------------------------------------------------


def document(peer: int, number: int, *teachers: tuple[int, int]) -> Manifest:
    used = tuple(consumed(*each) for each in teachers)
    return manifest(peer, number, run=federation().digest(), consumed=used)


def whole_run() -> dict[tuple[int, int], Manifest]:
    drawn = federation()
    keys = [(i, number) for number in range(7) for i in drawn.active(number)]
    return {
        key: document(*key, *((j, drawn.version(j, key[1] - 1)) for j in drawn.teachers_of(*key) if key[1]))
        for key in keys
    }


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (document(1, 3), "manifest is of round 3, in which peer 1 has no part"),
        (document(3, 3, (2, 1)), "manifest names peer 2 as teacher, which has no part in round 3"),
        (document(3, 3, (0, 0)), "manifest names teachers of round 0, expected none before 1"),
        (document(3, 3, (0, 2)), "manifest names peer 0 as teacher with round 2, in which it has no part"),
    ],
)
def test_a_manifest_that_the_draw_does_not_allow(said: Manifest, message: str) -> None:
    intake = Intake(federation(), {"cnn6": {"weights": TensorSpec("U8", (1,))}}, 2)
    with pytest.raises(SnapshotError, match=message):
        intake.manifest(said.to_bytes(), said.peer, said.round)


def commit(store: Store, of: Manifest) -> None:
    staging = store.staging_dir(of.round)
    for name in (SNAPSHOT_FILE, CHECKPOINT_FILE):
        (staging / name).write_bytes(b"bytes")
    store.commit(staging, of, RoundRecord(of.peer, of.round, of.sha256, 0.5))


def test_what_a_peer_keeps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = Store(tmp_path)
    store.open(federation(), 0)
    for number in (0, 1, 3):
        commit(store, document(0, number))
        store.record_history()
    received = {(3, 0): "safetensors", (3, 2): "safetensors", (2, 0): "safetensors", (1, 0): "partial"}
    for (peer, number), suffix in received.items():
        store.save_received_manifest(document(peer, number))
        store.received_snapshot_path(peer, number).with_suffix(f".{suffix}").write_bytes(b"")
    prune(store, {1, 3}, 2)
    assert store.kept_rounds() == [1, 3]
    assert store.signed_rounds() == [0, 1, 3]
    assert Store(tmp_path).manifest(0) == document(0, 0)  # for those that come late, also after another start
    assert all(store.received_manifest(*key) for key in received)
    left = {(int(path.stem), int(path.parent.name)) for path in tmp_path.glob("received/*/*.safetensors")}
    assert left == {(3, 0), (3, 2), (2, 0)}
    assert not list(tmp_path.glob("received/*/*.partial"))  # the version as of round 2 is another one: (1, 2)
    commit(store, document(0, 6))
    store.record_history()
    assert "which are lost" not in caplog.text  # rounds 4 and 5 are not this peer's
    assert store.passed() == -1
    store.save_passed(6)
    assert Store(tmp_path).passed() == 6
    store.close()


def test_the_last_two_rounds_that_were_a_peers_stay_and_its_model_of_the_best_round() -> None:
    node = object.__new__(Node)
    node._federation, node._id, node._best = federation(), 0, BestRound(2, 0.5)
    assert node._kept(6) == {6, 3, 1}
    node._federation = federation(participation=None)
    assert node._kept(6) == {6, 5, 2}


def test_what_is_on_its_way_is_not_deleted_however_old(tmp_path: Path) -> None:
    """Round 0 is the version of peer 1 still, and may be fetched for long after others have had their round 1."""
    store = Store(tmp_path)
    store.open(federation(), 2)
    for number in (0, 1):
        commit(store, document(2, number))
    store.save_received_manifest(document(1, 0))
    partial = store.received_snapshot_path(1, 0).with_suffix(".partial")
    partial.write_bytes(b"")
    prune(store, {0, 1}, 1)
    assert partial.exists()
    store.close()


def test_check_does_not_take_the_last_round_that_was_a_peers_for_the_end(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.open(federation(), 3)
    commit(store, document(3, 4))
    assert "goes on after round 4" in _check_state(store, federation(), 3, None).sentence
    store.save_passed(6)
    assert "all 6 rounds are done" in _check_state(store, federation(), 3, None).sentence
    store.close()


def run() -> Run:
    of = federation()
    return Run(of.digest(), of.federation, 6, dict.fromkeys(of.ids, "cnn6"), may_miss=False, schedule=of.schedule)


def audited(manifests: dict[tuple[int, int], Manifest], owner: Owner) -> tuple[tuple[str, ...], tuple[str, ...]]:
    lineage = Lineage(Entry(each, (f"{each.peer}/{each.round}",), misfit(each, run())) for each in manifests.values())
    report = audit(run(), [owner], lineage)
    return report.findings, report.notes


def test_rounds_of_others_are_no_gaps_of_a_lineage() -> None:
    them = whole_run()
    assert audited(them, Owner(0, frozenset({1, 3, 6}))) == ((), ())
    lineage = Lineage(Entry(each, ("",)) for each in them.values())
    found = ancestry(lineage, them[0, 6].sha256, run().schedule)
    assert found is not None
    assert found.is_whole
    assert found.by_round() == "rounds 4 to 6: 1 each, rounds 1 to 3: 2 each, round 0: 4"


def test_a_manifest_that_every_peer_must_have_is_missed() -> None:
    them = whole_run()
    del them[2, 4]  # peer 0 has collected it before it trained round 6
    findings, _ = audited(them, Owner(0, frozenset({1, 3, 6})))
    assert (
        findings == ("round 4 of peer 2: its manifest is not here, though round 5 of peer 1 names its snapshot",)
        or "round 4 of peer 2: its manifest is not here" in findings[0]
    )
    _, notes = audited(them, Owner(0, frozenset({1, 3, 6}), recovered=frozenset({6})))
    assert "peer 0 lost its disk" in notes[0]


def test_a_manifest_of_a_round_that_is_not_its_peers_is_a_finding() -> None:
    assert "in which peer 1 has no part" in str(misfit(document(1, 3), run()))
    assert "which the participation does not allow" in str(misfit(document(3, 3, (0, 0)), run()))
    assert misfit(document(3, 3, (0, 1)), run()) is None


def test_the_schedule_as_one_peer_sees_it() -> None:
    drawn = federation().schedule
    assert drawn is not None
    part = Part(drawn, 3)
    assert [part.is_active(number) for number in range(7)] == [True, False, True, True, True, False, False]
    assert [part.takes(1, number) for number in range(3)] == [True, True, False]
    assert json.loads(json.dumps(drawn.active(1))) == [0, 2]
