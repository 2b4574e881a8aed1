"""The chaos command: its plan of faults, its checker with every kind of wrong history, and short runs of real peers."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from crad_p2p.federation import Federation, build_federation
from crad_p2p.manifest import ClassStatistics, Consumed, Manifest
from crad_p2p.results import RoundRecord
from crad_p2p.snapshot import CHECKPOINT_FILE, SNAPSHOT_FILE
from launch.chaos import Chaos, Report, span
from launch.checker import check
from launch.faults import Fault, plan
from peer.barrier import Barrier, Quorum
from peer.events import Announced, Connected, LearnerUp, Published, Tick
from peer.recorder import FILE, Recorder
from peer.store import Store
from peer.witness import Conflict

COMMAND = str(Path(sys.executable).with_name("crad-mesh"))

# --- the plan ---------------------------------------------------------------------------------------------------------


def first(ids: tuple[int, ...], seed: int, count: int = 500) -> list[Fault]:
    return list(itertools.islice(plan(ids, seed), count))


def test_a_seed_gives_the_same_faults_again_and_another_seed_others() -> None:
    assert first((0, 1, 2), 7) == first((0, 1, 2), 7)
    assert first((0, 1, 2), 7) != first((0, 1, 2), 8)


@pytest.mark.parametrize("ids", [(0, 1), (3, 4, 9, 11, 12)])
def test_a_plan_has_every_kind_of_fault_and_hits_only_peers_of_the_federation(ids: tuple[int, ...]) -> None:
    faults = first(ids, 0)
    assert {(fault.kind, fault.how) for fault in faults} == {
        *itertools.product(("kill", "stop"), ("service", "learner", "both")),
        *itertools.product(("cut",), ("silent", "half-open", "reset", "slow")),
    }
    assert all(fault.peers and set(fault.peers) <= set(ids) and fault.after > 0 <= fault.lasts for fault in faults)
    assert any(fault.kind == "kill" and fault.peers == ids for fault in faults)  # all at once
    assert max(fault.lasts for fault in faults if fault.kind == "cut") > 12  # longer than keepalive needs
    assert {peer for fault in faults for peer in fault.peers} == set(ids)


def test_faults_in_words() -> None:
    assert (
        str(Fault(1, "kill", "both", (2,), 1.5)) == "kill the service and learner of peer 2; started again after 1.5 s"
    )
    assert str(Fault(1, "kill", "learner", (2, 3), 1.5)) == "kill the learner of peers 2, 3"
    assert str(Fault(1, "stop", "service", (0,), 3)) == "stop the service of peer 0, for 3.0 s"
    assert str(Fault(1, "cut", "silent", (0, 1), 3, pair=True)) == "silent cut between peers 0, 1, for 3.0 s"
    assert str(Fault(1, "cut", "slow", (0,), 3)) == "slow cut between peer 0 and all others, for 3.0 s"


# --- the checker ------------------------------------------------------------------------------------------------------

IDS = (0, 1, 2)
ROUNDS = 3


def snapshot(peer: int, number: int) -> bytes:
    return f"{peer} {number}".encode()


def digest(peer: int, number: int) -> str:
    return hashlib.sha256(snapshot(peer, number)).hexdigest()


class Run:
    """What three peers leave behind after three rounds in which nothing went wrong; to be spoiled."""

    def __init__(self, folder: Path, policy: str) -> None:
        self.federation: Federation = build_federation(
            {
                "federation": "checked",
                "rounds": ROUNDS,
                "barrier": {"policy": policy},
                "peers": [{"id": i, "address": f"127.0.0.1:{7000 + i}"} for i in IDS],
            },
            "test",
        )
        self.stores = {i: Store(folder / str(i)) for i in IDS}
        self.reference = [self.record(i, number) for i in IDS for number in range(1, ROUNDS + 1)]
        for i, store in self.stores.items():
            (store.root / "rounds").mkdir(parents=True)
            for number in (ROUNDS - 1, ROUNDS):
                staging = store.staging_dir(number)
                (staging / SNAPSHOT_FILE).write_bytes(snapshot(i, number))
                (staging / CHECKPOINT_FILE).touch()
                store.commit(staging, self.manifest(i, number), self.record(i, number))
            for j in set(IDS) - {i}:
                self.put(store.received_manifest_path(j, ROUNDS - 1), self.manifest(j, ROUNDS - 1))
            self.write_history(i, [self.record(i, number) for number in range(1, ROUNDS + 1)])

    @staticmethod
    def put(path: Path, manifest: Manifest) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(manifest.to_bytes())

    def write_history(self, peer: int, records: list[RoundRecord]) -> None:
        (self.stores[peer].root / "history.jsonl").write_text("".join(record.to_line() for record in records))

    def spoil(self, peer: int, number: int, **changes: Any) -> None:
        """Change one line of a history."""
        records = self.stores[peer].history()
        self.write_history(peer, [replace(each, **changes) if each.round == number else each for each in records])

    @staticmethod
    def record(peer: int, number: int) -> RoundRecord:
        teachers = tuple(j for j in IDS if j != peer)
        return RoundRecord(
            peer=peer, round=number, snapshot_sha256=digest(peer, number), validation_accuracy=0.5, teachers=teachers
        )

    def manifest(self, peer: int, number: int) -> Manifest:
        return Manifest(
            run=self.federation.digest(),
            peer=peer,
            round=number,
            arch="cnn6",
            size=len(snapshot(peer, number)),
            sha256=digest(peer, number),
            statistics=ClassStatistics(counts=(1,), hits=(1,), predicted=(1,)),
            consumed=tuple(Consumed(peer=j, round=number - 1, sha256=digest(j, number - 1)) for j in IDS if j != peer),
            model_round=number,
            missing=(),
            quarantined=(),
        )

    def wrong(self, *, compare: bool = True) -> list[str]:
        return check(self.federation, self.stores, self.reference if compare else None)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path, "all")


@pytest.fixture
def quorum(tmp_path: Path) -> Run:
    return Run(tmp_path, "quorum")


def test_nothing_is_wrong_with_an_undisturbed_run(run: Run) -> None:
    assert run.wrong() == []


def test_a_damaged_round_on_disk(run: Run) -> None:
    path = run.stores[1].round_dir(ROUNDS) / SNAPSHOT_FILE
    path.write_bytes(b"something else")
    (wrong,) = run.wrong()
    assert wrong.startswith(f"peer 1: {path.parent} is damaged (snapshot.safetensors does not have the digest")


def test_a_round_with_other_bytes_than_undisturbed(run: Run) -> None:
    run.spoil(1, 1, snapshot_sha256="f" * 64)
    expected = f"peer 1, round 1: its snapshot is ffffffffffff…, undisturbed {digest(1, 1)[:12]}…"
    assert expected in run.wrong()
    assert expected not in run.wrong(compare=False)


def test_a_round_that_was_trained_twice(run: Run) -> None:
    history = run.stores[2].history()
    run.write_history(2, [*history[:2], history[1], history[2]])
    assert any("peer 2: round 3 was due, and its history has round 2" in each for each in run.wrong())


def test_a_round_that_is_not_there(run: Run) -> None:
    history = run.stores[2].history()
    run.write_history(2, [history[0], history[2]])
    assert any("peer 2: round 2 was due, and its history has round 3" in each for each in run.wrong())
    run.write_history(2, history[:2])
    assert any(each == "peer 2 ended after round 2 of 3" for each in run.wrong())


def test_skipping_is_for_a_quorum(run: Run) -> None:
    run.write_history(0, [run.record(0, 1), replace(run.record(0, 3), skipped_rounds=(2,), teachers=())])
    assert any(each == "peer 0 skipped rounds [2] under policy all" for each in run.wrong())


def test_a_line_of_another_peer(run: Run) -> None:
    history = run.stores[0].history()
    run.write_history(0, [history[0], replace(history[1], peer=1), history[2]])
    assert any("round 2 of peer 1" in each for each in run.wrong())


def test_teachers_that_are_not_accounted_for(run: Run) -> None:
    run.spoil(0, 2, teachers=(1,))
    assert run.wrong() == ["peer 0, round 2: peers [1, 2] may teach, and its history names [1]"]
    run.spoil(0, 2, teachers=(1, 2), missing_teachers=(2,))
    assert any("names [1, 2, 2]" in each for each in run.wrong())


@pytest.mark.parametrize("changes", [{"teachers": (1,), "missing_teachers": (2,)}, {"stale_teachers": (1,)}])
def test_going_on_without_one_is_for_a_quorum(run: Run, changes: dict[str, Any]) -> None:
    run.spoil(0, 2, **changes)
    assert run.wrong() == ["peer 0, round 2: trained without the newest of all others under policy all"]


@pytest.mark.parametrize("changes", [{"teachers": (1,), "missing_teachers": (2,)}, {"stale_teachers": (1,)}])
def test_a_quorum_goes_on_without_one(quorum: Run, changes: dict[str, Any]) -> None:
    quorum.spoil(0, 2, **changes)
    assert quorum.wrong(compare=False) == []


class HastyBarrier(Barrier):
    """Planted fault: whoever is missing, the quorum is there."""

    def _has_quorum(self) -> bool:
        return True


@pytest.mark.parametrize(("kind", "wrong"), [(HastyBarrier, True), (Barrier, False)])
def test_a_round_that_too_few_had_reached(quorum: Run, kind: type[Barrier], wrong: bool) -> None:
    """All histories are complete; only the recorded events show it."""
    barrier = kind([1, 2], 3, lambda _: (1, 2), 1, quorum=Quorum(2, 2, 1.0))
    root = quorum.stores[0].root
    recorder = Recorder(root, barrier)
    events = [Connected(1), Connected(2), LearnerUp(), Announced(1, 0, 0.1), Announced(2, 0, 0.1), Tick(1e6)]
    for now, event in enumerate(events):
        now = event.now if isinstance(event, Tick) else now
        recorder.record(now, event, barrier.step(Tick(now)) + barrier.step(event))
    recorder.close()
    expected = [f"{root / FILE}, line 6: round 2 was trained when 1 peers had the round before, and 2 are needed"]
    found = [each for each in quorum.wrong(compare=False) if "had the round before" in each]
    assert found == (expected if wrong else [])


def test_a_teacher_that_never_published(quorum: Run) -> None:
    quorum.write_history(2, [quorum.record(2, 1), replace(quorum.record(2, 3), skipped_rounds=(2,), teachers=())])
    expected = "peer 0, round 3: taught by peer 2, which never published round 2"
    assert expected in quorum.wrong(compare=False)


def test_a_disk_that_names_other_bytes_than_were_published(run: Run) -> None:
    manifest = run.manifest(1, 2)
    other = manifest.model_copy(update={"sha256": "e" * 64})
    run.put(run.stores[0].received_manifest_path(1, 2), other)
    (found,) = run.wrong()
    assert found.startswith("on the disk of peer 0, round 2 of peer 1 names eeeeeeeeeeee… for round 2 of peer 1, which")
    consumed = (manifest.consumed[0].model_copy(update={"sha256": "d" * 64}), manifest.consumed[1])
    run.put(run.stores[0].received_manifest_path(1, 2), manifest.model_copy(update={"consumed": consumed}))
    (found,) = run.wrong()
    assert "round 2 of peer 1 names dddddddddddd… for round 1 of peer 0" in found


def test_evidence_is_reported(run: Run) -> None:
    run.stores[1].save_conflict(Conflict(2, 1, "a", "x", "b", "y"), {})
    assert any("evidence of two snapshots for one round" in each for each in run.wrong())


def record_some_events(folder: Path) -> Path:
    barrier = Barrier([1], 2, lambda _: (1,))
    recorder = Recorder(folder, barrier)
    for now, event in enumerate([Connected(1), LearnerUp(), Published(0), Announced(1, 0)]):
        recorder.record(now, event, barrier.step(Tick(now)) + barrier.step(event))
    recorder.close()
    return folder / FILE


def test_recorded_events_must_replay(run: Run) -> None:
    path = record_some_events(run.stores[0].root)
    assert run.wrong() == []
    text = path.read_text()
    path.write_text(text.replace("MakeInitialModel", "Finish"))
    assert run.wrong() == [f"{path}, line 3: replayed, the same events give other decisions"]
    path.write_text(text.replace('"now"', '"then"'))
    assert any("line 2 is not of a recording" in each for each in run.wrong())


# --- the commands -----------------------------------------------------------------------------------------------------


def crad_mesh(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([COMMAND, *arguments], cwd=cwd, capture_output=True, text=True, timeout=280)


def test_replay_shows_what_was_decided_and_says_where_it_differs(tmp_path: Path) -> None:
    path = record_some_events(tmp_path)
    ended = crad_mesh("replay", str(tmp_path), cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "Published -> FetchManifest" not in ended.stdout
    assert "LearnerUp -> MakeInitialModel" in ended.stdout
    assert "Announced peer 1 round 0 busy 0.0 s -> FetchManifest peer 1 round 0" in ended.stdout
    assert "round 1 waits for round 0 of peer 1" in ended.stdout
    assert f"{path}: 4 events replay to the same decisions" in ended.stdout
    assert "LearnerUp" not in crad_mesh("replay", str(path), "--last", "1", cwd=tmp_path).stdout
    path.write_text(path.read_text().replace("MakeInitialModel", "Finish"))
    ended = crad_mesh("replay", str(path), cwd=tmp_path)
    assert ended.returncode == 8
    assert "the recorded decisions are Finish, replayed they are MakeInitialModel" in ended.stderr
    nothing = crad_mesh("replay", str(tmp_path / "nothing"), cwd=tmp_path)
    assert nothing.returncode == 2
    assert "no events.jsonl is there" in nothing.stderr


def test_replay_leaves_out_what_follows_a_damaged_line(tmp_path: Path) -> None:
    for _ in range(2):
        path = record_some_events(tmp_path)
    ended = crad_mesh("replay", str(tmp_path), cwd=tmp_path)
    starts = [line for line in ended.stdout.splitlines() if line.endswith("the service was started")]
    assert (ended.returncode, len(starts)) == (0, 2)
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}Z  ", line) for line in starts)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], lines[2][1:], *lines[3:]]) + "\n")
    ended = crad_mesh("replay", str(tmp_path), cwd=tmp_path)
    said = [line[26:] for line in ended.stdout.splitlines()]
    events = [
        line.split()[0] for line in said if re.match(r"Connected|LearnerUp|Published|Announced|line|the service", line)
    ]
    assert events == ["the", "Connected", "line", "the", "Connected", "LearnerUp", "Published", "Announced"]
    damaged = "line 3 is damaged; what follows, up to the next start of the service, is left out"
    assert damaged in said
    assert f"{path}: 5 events replay to the same decisions" in ended.stdout
    assert ended.returncode == 8
    assert ended.stderr.startswith(f"crad-mesh: {path}, line 3 is not JSON; expected a recording of crad-peer, and")
    (whole,) = crad_mesh("replay", str(path), "--last", "1", cwd=tmp_path).stdout.splitlines()[:1]
    assert "Announced" in whole


def test_a_directory_with_something_in_it_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").touch()
    ended = crad_mesh("chaos", "--out", "out", cwd=tmp_path)
    assert ended.returncode == 2
    assert "is not empty" in ended.stderr


# --- what is inflicted ------------------------------------------------------------------------------------------------


class Tame(Chaos):
    """Without peers."""

    def __init__(self, folder: Path, *, faults: int = 1, rounds: tuple[int, ...] = (0, 0), policy: str = "all") -> None:
        peers = [{"id": i, "address": f"127.0.0.1:{1 + i}", "arch": "cnn6"} for i in range(len(rounds))]
        tree = {"federation": "tame", "rounds": 9, "barrier": {"policy": policy}, "peers": peers}
        federation = build_federation(tree, "test")
        super().__init__(federation, folder, seed=0, faults=faults, note=lambda _: None)
        self.rounds = rounds
        self.begun: list[Fault] = []
        self.undone: list[Fault] = []

    def _last_rounds(self) -> list[int]:
        return list(self.rounds)


class Recorded(Tame):
    async def _inflict(self, fault: Fault) -> None:
        self.begun.append(fault)
        await asyncio.sleep(0.05)
        self.undone.append(fault)


def test_every_fault_is_inflicted_and_lasts_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = [Fault(0.001, "cut", "silent", (0,), each) for each in (1.0, 2.0, 3.0)]
    monkeypatch.setattr("launch.chaos.plan", lambda *_: iter(faults))
    for count in (1, 3):
        chaos = Recorded(tmp_path, faults=count, rounds=(2, 2))  # half as far as the last one's
        asyncio.run(chaos._disturb())
        assert chaos.begun == chaos.undone == faults[:count]


def test_faults_do_not_wait_for_their_time_when_the_rounds_go_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launch.chaos.plan", lambda *_: (Fault(3600, "cut", "slow", (0,), 1.0) for _ in range(5)))
    chaos = Recorded(tmp_path, faults=5, rounds=(8, 7))  # round 8 of 9: all have to come now
    asyncio.run(asyncio.wait_for(chaos._disturb(), 10))
    assert len(chaos.undone) == 5
    done = Recorded(tmp_path, faults=5, rounds=(9, 9))
    asyncio.run(asyncio.wait_for(done._disturb(), 10))
    assert done.begun == []


def test_faults_whose_time_has_come_wait_for_slow_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 9 rounds and 4 faults these belong to rounds 1, 2, 4, 6, of which all have to have reached half."""
    monkeypatch.setattr("launch.chaos.plan", lambda *_: (Fault(0.001, "cut", "slow", (0,), 1.0) for _ in range(4)))

    async def run(chaos: Recorded) -> None:
        disturbing = asyncio.create_task(chaos._disturb())
        for rounds, count in (((-1, -1), 0), ((0, -1), 0), ((0, 0), 1), ((1, 0), 1), ((1, 1), 2), ((2, 2), 3)):
            chaos.rounds = rounds
            await asyncio.sleep(0.2)
            async with asyncio.timeout(10):
                while len(chaos.begun) < count:
                    await asyncio.sleep(0.01)
            assert len(chaos.begun) == count, rounds
        chaos.rounds = (6, 2)  # one of them is there
        await disturbing

    chaos = Recorded(tmp_path, faults=4)
    asyncio.run(run(chaos))
    assert chaos.report.reached == [0, 1, 2, 2]


def test_faults_do_not_wait_for_rounds_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launch.chaos.plan", lambda *_: (Fault(0.001, "cut", "slow", (0,), 1.0) for _ in range(3)))
    monkeypatch.setattr("launch.chaos._PATIENCE", 0.1)
    chaos = Recorded(tmp_path, faults=3, rounds=(-1, -1))
    asyncio.run(asyncio.wait_for(chaos._disturb(), 10))
    assert chaos.report.reached == [-1, -1, -1]


@pytest.mark.parametrize(("policy", "reached"), [("all", -1), ("quorum", 4)])
def test_a_quorum_goes_on_without_the_others(tmp_path: Path, policy: str, reached: int) -> None:
    assert Tame(tmp_path, rounds=(4, -1, 5, 4, 0), policy=policy)._reached() == reached


@pytest.mark.parametrize(
    ("rounds", "faults", "reached", "reason"),
    [
        (30, 4, [0, 0, 1, 5], None),
        (30, 4, [0, 0, 0, 5], "only 1 of 4 faults came after round 1 was published by all peers that a round needs"),
        (30, 8, [-1] * 8, "only 0 of 8 faults came after round 1 was published by all peers that a round needs"),
        (30, 4, [3, 3, 3], "all 30 rounds were done after 3 of 4 faults"),
        (30, 5, [0, 0, 0, 1, 1], None),  # of an odd number, the smaller half
        (30, 1, [0], None),
        (4, 4, [0, 0, 1, 1], None),
        (3, 4, [0, 0, 0, 0], None),  # by the plan of so short a run no fault has to wait for round 1
        (2, 4, [-1, -1, 0, 0], None),
        (2, 4, [-1, -1, -1, 0], "only 1 of 4 faults came after round 0 was published by all peers that a round needs"),
    ],
)
def test_a_run_that_tried_too_little(rounds: int, faults: int, reached: list[int], reason: str | None) -> None:
    said = Report(reached=reached).too_little(rounds, faults)
    assert said == reason or (said is not None and reason is not None and said.startswith(f"{reason}; give more"))


def test_spans_of_rounds_in_words() -> None:
    assert [span(-1, -1), span(-1, 0), span(0, 0), span(-1, 2), span(3, 5), span(4, 4)] == [
        *("before round 0", "round 0", "round 0", "rounds 0 to 2", "rounds 3 to 5", "round 4")
    ]


class Dying(Tame):
    """Its one service dies by a signal of its own, and by one that is a planned fault; then it finishes."""

    async def _start(self, peer: int) -> asyncio.subprocess.Process:
        number = self.report.starts[peer]
        code = ["import os; os.kill(os.getpid(), 11)", "import os; os.kill(os.getpid(), 9)", "input()", ""][number - 1]
        folder = self._out / "peers/0"
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, str(folder), stdin=asyncio.subprocess.PIPE
        )
        if number == 3:
            folder.mkdir(parents=True)
            (folder / "service.pid").write_text(str(process.pid))
            await self._inflict(Fault(1, "kill", "service", (0,), 0.1))
        return process


def test_a_service_that_dies_by_itself_is_told_from_one_that_is_killed(tmp_path: Path) -> None:
    chaos = Dying(tmp_path, rounds=(0,))
    asyncio.run(asyncio.wait_for(chaos._keep(0), 30))
    assert (chaos.report.starts.total(), chaos.report.faults) == (4, {"kill": 1})
    assert chaos.report.deaths == [
        f"the service of peer 0 ended by {signal.Signals(number).name}, which nobody had sent to it"
        for number in (11, 9)
    ]


class Wire:
    """Stands for a link; what is wrong with it now."""

    def __init__(self) -> None:
        self.wrong: set[str] = set()

    def cut(self) -> None:
        self.wrong.add("cut")

    def refuse(self) -> None:
        self.wrong.add("refused")

    def reset(self) -> None:
        self.wrong.add("reset")

    def heal(self) -> None:
        self.wrong.clear()


def test_a_short_cut_does_not_heal_a_longer_one(tmp_path: Path) -> None:
    chaos, wire = Tame(tmp_path), Wire()
    chaos._links = {(0, 1): wire}  # type: ignore[dict-item]

    async def run() -> None:
        long = asyncio.create_task(chaos._inflict(Fault(1, "cut", "silent", (0,), 0.4)))
        short = asyncio.create_task(chaos._inflict(Fault(1, "cut", "reset", (1,), 0.1)))
        await short
        assert wire.wrong == {"cut"}
        await long
        assert wire.wrong == set()

    asyncio.run(run())
    assert chaos.report.faults == {"cut": 2}


def test_a_process_is_stopped_until_the_last_stop_is_over(tmp_path: Path) -> None:
    folder = tmp_path / "peers/0"
    folder.mkdir(parents=True)
    process = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()", str(folder)], stdin=subprocess.PIPE
    )
    try:
        (folder / "service.pid").write_text(str(process.pid))
        chaos = Tame(tmp_path)

        def state() -> str:
            return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]

        async def run() -> None:
            long = asyncio.create_task(chaos._inflict(Fault(1, "stop", "service", (0,), 0.5)))
            await chaos._inflict(Fault(1, "stop", "both", (0,), 0.1))
            assert state() == "T"
            await long
            assert state() != "T"

        asyncio.run(run())
        assert (chaos.report.faults, chaos.report.missed) == ({"stop": 2}, 0)
    finally:
        process.kill()
        process.communicate()


def test_a_kill_that_finds_nobody_is_not_counted_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launch.chaos._WAIT", 0.1)
    chaos = Tame(tmp_path)
    asyncio.run(chaos._inflict(Fault(1, "kill", "both", (0, 1), 1.0)))
    assert (chaos.report.faults.total(), chaos.report.missed) == (0, 1)


@pytest.mark.parametrize(("policy", "seed"), [("all", 11), ("quorum", 12)])
def test_real_peers_survive_real_faults(tmp_path: Path, policy: str, seed: int) -> None:
    short = ["--count", "3", "--rounds", "6", "--faults", "4"]
    ended = crad_mesh("chaos", *short, "--policy", policy, "--seed", str(seed), "--out", "out", cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    words = " ".join(ended.stdout.split())
    assert "Nothing is wrong" in words
    assert re.search(r", in rounds? \d( to \d)? of 6, within", words)
    assert sum(map(int, re.findall(r"(\d+) (?:kills|stops|cuts|that found)", words))) == 4  # all that the plan has
    assert ("every round has the bytes of the undisturbed run" in words) == (policy == "all")
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["complete"] is True
    assert crad_mesh("replay", "out/peers/1", cwd=tmp_path).returncode == 0
