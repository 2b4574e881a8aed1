"""The state directory: what survives a kill at any moment, whose it is, and what is kept."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from wire import prune

from crad_p2p.errors import AlreadyRunningError, ConfigurationError, IncompleteError
from crad_p2p.federation import Federation, build_federation
from crad_p2p.manifest import ClassStatistics, Consumed, Manifest
from crad_p2p.results import BestRound, PeerResult, RoundRecord, Seconds
from crad_p2p.snapshot import CHECKPOINT_FILE, SNAPSHOT_FILE
from peer.store import MANIFEST, Store, describe_difference
from peer.witness import Conflict

FEDERATION = {
    "federation": "store-test",
    "rounds": 9,
    "peers": [{"id": i, "address": f"127.0.0.1:{7400 + i}", "arch": "cnn6"} for i in range(3)],
}
ROUND_FILES = {SNAPSHOT_FILE, CHECKPOINT_FILE, "manifest.json", "record.json"}


class KilledError(BaseException):
    """The process ends here. Not an Exception, so that nothing handles it."""


def federation(**changes: Any) -> Federation:
    return build_federation({**FEDERATION, **changes}, "test")


def manifest_of(number: int, content: bytes = b"") -> Manifest:
    return Manifest(
        run=federation().digest(),
        peer=0,
        round=number,
        arch="cnn6",
        size=len(content) or 1,
        sha256=f"{number:064x}",
        statistics=ClassStatistics(counts=(1, 2), hits=(0, 1), predicted=(2, 1)),
        consumed=(),
        model_round=number,
        missing=(),
        quarantined=(),
    )


def record_of(number: int) -> RoundRecord:
    return RoundRecord(
        peer=0,
        round=number,
        snapshot_sha256=f"{number:064x}",
        validation_accuracy=0.5,
        teachers=(1, 2),
        seconds=Seconds(train=2.0),
    )


def commit(store: Store, number: int) -> None:
    staging = store.staging_dir(number)
    (staging / SNAPSHOT_FILE).write_bytes(b"snapshot %d" % number)
    (staging / CHECKPOINT_FILE).write_bytes(b"checkpoint %d" % number)
    store.commit(staging, manifest_of(number), record_of(number))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path / "state")
    store.open(federation(), 0)
    yield store
    store.close()


def reopened(store: Store) -> Store:
    """The state directory as the next process finds it."""
    store.close()
    following = Store(store.root)
    following.open(federation(), 0)
    return following


# --- committing -------------------------------------------------------------------------------------------------------


def test_an_empty_directory_has_no_round(store: Store) -> None:
    assert store.last_round() == -1


def test_a_new_directory_is_for_its_owner_alone_and_one_that_is_there_keeps_its_mode(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        for name, mode in (("new", 0o700), ("given", 0o750)):
            root = tmp_path / "states" / name
            if name == "given":
                root.mkdir(mode=mode)
            store = Store(root)
            store.open(federation(), 0)
            store.close()
            assert stat.S_IMODE(root.stat().st_mode) == mode
    finally:
        os.umask(before)


def test_a_committed_round_is_there_whole(store: Store) -> None:
    commit(store, 0)
    commit(store, 1)
    assert store.last_round() == 1
    folder = store.round_dir(1)
    assert {path.name for path in folder.iterdir()} == ROUND_FILES
    assert (folder / SNAPSHOT_FILE).read_bytes() == b"snapshot 1"
    assert store.manifest(1) == manifest_of(1)
    document = json.loads((folder / "record.json").read_text())
    assert document["checkpoint_sha256"] == hashlib.sha256(b"checkpoint 1").hexdigest()
    record = RoundRecord.from_line(json.dumps(document["record"]))
    assert record.seconds.commit > 0
    assert record == RoundRecord(**{**vars(record_of(1)), "seconds": record.seconds})
    assert record.seconds.train == 2.0
    assert [path.name for path in folder.parent.iterdir() if path.name.startswith(".")] == []


def test_rounds_are_ordered_by_number_beyond_six_digits(store: Store) -> None:
    for number in (9, 10, 1_000_000):
        commit(store, number)
    assert store.last_round() == 1_000_000


def test_all_is_durable_before_the_rename_and_the_rename_before_the_end(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def noted_fsync(fd: int) -> None:
        fsync(fd)
        done.append(Path(f"/dev/fd/{fd}").resolve().name)

    def noted_rename(path: Path, target: Path) -> Path:
        done.append("rename")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "rename", noted_rename)
    commit(store, 0)
    before, after = done[: done.index("rename")], done[done.index("rename") + 1 :]
    staging = before[-1]
    assert staging.startswith(".staging-000000-")
    assert set(before) == ROUND_FILES | {staging}  # the directory last, when all its entries are there
    assert after == ["rounds"]


@pytest.mark.parametrize("calls", range(1, 7))
def test_a_kill_within_a_commit_leaves_the_last_round_or_the_whole_new_one(
    store: Store, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    commit(store, 0)
    fsync, left = os.fsync, [calls]

    def killed_fsync(fd: int) -> None:
        left[0] -= 1
        if not left[0]:
            raise KilledError
        fsync(fd)

    monkeypatch.setattr(os, "fsync", killed_fsync)
    with pytest.raises(KilledError):
        commit(store, 1)
    monkeypatch.undo()
    store = reopened(store)
    renamed = calls == 6  # only the fsync of the parent directory comes after the rename
    assert store.last_round() == int(renamed)
    assert sorted(path.name for path in store.round_dir(0).parent.iterdir()) == ["000000", "000001"][: 1 + renamed]
    for number in range(store.last_round() + 1):
        assert {path.name for path in store.round_dir(number).iterdir()} == ROUND_FILES
    if not renamed:
        commit(store, 1)
        assert store.last_round() == 1
    store.close()


def test_a_kill_right_before_the_rename_leaves_the_last_round(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    commit(store, 0)

    def killed_rename(_path: Path, _target: Path) -> None:
        raise KilledError

    monkeypatch.setattr(Path, "rename", killed_rename)
    with pytest.raises(KilledError):
        commit(store, 1)
    assert store.last_round() == 0
    assert store.manifest(0) == manifest_of(0)


@pytest.mark.parametrize("failing", ["fsync", "rename"])
def test_a_full_disk_ends_the_run_and_leaves_the_last_round(
    store: Store, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    commit(store, 0)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(*{"fsync": (os, "fsync"), "rename": (Path, "rename")}[failing], full)
    with pytest.raises(IncompleteError, match=r"round 1 could not be written to .*No space left on device"):
        commit(store, 1)
    assert store.last_round() == 0


def test_a_committed_round_is_never_replaced(store: Store) -> None:
    commit(store, 0)
    with pytest.raises(IncompleteError, match="round 0 could not be written"):
        commit(store, 0)
    assert (store.round_dir(0) / SNAPSHOT_FILE).read_bytes() == b"snapshot 0"


def test_leftovers_are_cleared(store: Store) -> None:
    commit(store, 0)
    staging = store.staging_dir(1)
    (staging / SNAPSHOT_FILE).write_bytes(b"half")
    store = reopened(store)
    assert not staging.exists()
    assert store.last_round() == 0
    store.close()


def test_a_staging_directory_is_empty_each_time(store: Store) -> None:
    first = store.staging_dir(3)
    (first / "left").write_bytes(b"of a learner that ended")
    second = store.staging_dir(3)
    assert list(second.iterdir()) == []
    assert second != first  # which is gone for whoever still wants to write there
    assert not first.exists()


# --- whose it is ------------------------------------------------------------------------------------------------------

_HOLDER = """
import sys
from pathlib import Path
from crad_p2p.federation import Federation
from peer.store import Store
store = Store(Path(sys.argv[1]))
store.open(Federation.model_validate_json(sys.argv[2]), 0)
print("holds", flush=True)
sys.stdin.read()
"""


def test_only_one_process_at_a_time(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(tmp_path / "state"), federation().model_dump_json()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "holds\n"
        store = Store(tmp_path / "state")
        with pytest.raises(AlreadyRunningError, match=rf"already running on .*state \(process {holder.pid}\)"):
            store.open(federation(), 0)
    finally:
        holder.kill()
        holder.communicate()
    store = Store(tmp_path / "state")
    store.open(federation(), 0)  # a killed process holds nothing
    assert (tmp_path / "state/lock").read_text() == str(os.getpid())
    store.close()


def test_the_lock_names_the_process_of_now_only(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("123456789012")  # of an earlier one
    store = Store(tmp_path)
    store.open(federation(), 0)
    assert (tmp_path / "lock").read_text() == str(os.getpid())
    store.close()


def test_a_closed_store_lets_go_of_the_lock(store: Store) -> None:
    rival = Store(store.root)
    with pytest.raises(AlreadyRunningError, match=f"process {os.getpid()}"):
        rival.open(federation(), 0)
    store.close()
    rival.open(federation(), 0)
    rival.close()


@pytest.mark.parametrize(
    ("changes", "peer_id", "difference"),
    [
        ({}, 2, "peer id is 0 in the state directory and 2 in the federation file"),
        ({"seed": 7}, 0, "seed is 1024 in the state directory and 7 in the federation file"),
        ({"rounds": 10}, 0, "rounds is 9 in the state directory and 10 in the federation file"),
        (
            {"method": {"temperature": 2.0}},
            0,
            "method.temperature is 3.0 in the state directory and 2.0 in the federation file",
        ),
        (
            {"peers": FEDERATION["peers"][:2]},  # type: ignore[index]
            0,
            'peers.2.arch is "cnn6" in the state directory and absent in the federation file',
        ),
    ],
)
def test_the_state_of_another_run_is_refused(
    store: Store, changes: dict[str, Any], peer_id: int, difference: str
) -> None:
    commit(store, 0)
    store.close()
    with pytest.raises(ConfigurationError) as raised:
        Store(store.root).open(federation(**changes), peer_id)
    assert str(store.root) in str(raised.value)
    assert f"belongs to another run: {difference};" in str(raised.value)
    assert store.last_round() == 0


def test_other_addresses_are_the_same_run(store: Store) -> None:
    store.close()
    moved = [{**peer, "address": f"127.0.0.1:{9000 + peer['id']}"} for peer in FEDERATION["peers"]]  # type: ignore
    store.open(federation(peers=moved), 0)


@pytest.mark.parametrize("below", ["", "deeper"])
def test_a_file_in_place_of_the_directory_is_refused(tmp_path: Path, below: str) -> None:
    (tmp_path / "state").write_text("a file")
    with pytest.raises(ConfigurationError, match=r"state directory .*state.*cannot be written \(.+\).*--state-dir"):
        Store(tmp_path / "state" / below).open(federation(), 0)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_without_write_permission_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    try:
        with pytest.raises(ConfigurationError, match=r"cannot be written \(Permission denied\)"):
            Store(tmp_path / "state").open(federation(), 0)
    finally:
        tmp_path.chmod(0o755)


@pytest.mark.parametrize(
    ("found", "expected", "sentence"),
    [
        ({"a": 1}, {"a": 1}, None),
        ({"a": 1, "c": 0, "b": "x"}, {"a": 1, "b": "y"}, 'b is "x" in there and "y" in here'),
        ({"a": 1}, {}, "a is 1 in there and absent in here"),
        ({}, {"a": None}, "a is absent in there and null in here"),
    ],
)
def test_the_first_difference_is_told_with_both_values(
    found: dict[str, Any], expected: dict[str, Any], sentence: str | None
) -> None:
    assert describe_difference(found, expected, "there", "here") == sentence


# --- history ----------------------------------------------------------------------------------------------------------


def rounds_in_history(store: Store) -> list[int]:
    lines = (store.root / "history.jsonl").read_text().splitlines()
    assert [RoundRecord.from_line(line) for line in lines] == store.history()
    return [json.loads(line)["round"] for line in lines]


@pytest.fixture
def with_history(store: Store) -> Store:
    for number in range(4):
        commit(store, number)
        store.record_history()
    return store


def test_history_has_one_line_a_round_from_round_one_on(with_history: Store) -> None:
    assert rounds_in_history(with_history) == [1, 2, 3]
    before = (with_history.root / "history.jsonl").read_bytes()
    with_history.record_history()
    assert (with_history.root / "history.jsonl").read_bytes() == before


def test_there_is_no_history_before_round_one(store: Store) -> None:
    store.record_history()
    assert store.history() == []
    commit(store, 0)
    store.record_history()
    assert store.history() == []


@pytest.mark.parametrize("missing", [1, 2])
def test_lines_that_a_killed_process_left_out_are_added(with_history: Store, missing: int) -> None:
    path = with_history.root / "history.jsonl"
    whole = path.read_text()
    path.write_text("".join(whole.splitlines(keepends=True)[:-missing]))
    with_history.record_history()
    assert path.read_text() == whole


@pytest.mark.parametrize("torn", [1, 2, 40])
def test_a_torn_line_is_replaced(with_history: Store, torn: int) -> None:
    path = with_history.root / "history.jsonl"
    whole = path.read_text()
    path.write_text(whole[:-torn])
    with_history.record_history()
    assert path.read_text() == whole


def test_a_torn_line_of_a_round_that_is_not_committed_goes(with_history: Store) -> None:
    path = with_history.root / "history.jsonl"
    whole = path.read_text()
    path.write_text(whole + '{"peer": 0, "rou')
    with_history.record_history()
    assert path.read_text() == whole


# --- what is kept -----------------------------------------------------------------------------------------------------


def test_prune_keeps_what_it_is_told_to_and_what_was_received_since(store: Store) -> None:
    for number in range(6):
        commit(store, number)
        store.received_manifest_path(1, number).parent.mkdir()
        store.received_manifest_path(1, number).write_text("{}")
        store.received_manifest_path(2, number).write_text("{}")
        store.received_snapshot_path(2, number).write_bytes(b"snapshot")
        store.received_snapshot_path(2, number).with_suffix(".partial").write_bytes(b"part")
    staging = store.staging_dir(6)
    prune(store, [5, 4, 2], received_from=5)
    assert sorted(path.name for path in (store.root / "rounds").iterdir()) == [
        staging.name,
        "000002",
        "000004",
        "000005",
    ]
    assert staging.is_dir()
    assert {str(path.relative_to(store.root / "received")) for path in (store.root / "received").glob("*/*")} == {
        "000005/1.json",
        "000005/2.json",
        "000005/2.safetensors",
        "000005/2.partial",
        "000004/2.json",
        "000004/2.safetensors",  # with that one, peer 2 can replace a disk that it lost
    }
    assert {path.name for path in (store.root / "received").iterdir()} == {"000004", "000005"}
    assert store.last_round() == 5


def test_the_two_newest_snapshots_of_a_peer_that_is_away_stay(store: Store) -> None:
    for number in range(20):
        store.received_manifest_path(1, number).parent.mkdir()
        for peer in (1, 2):
            if peer == 1 or number in (3, 5, 6):
                store.received_manifest_path(peer, number).write_text("{}")
                store.received_snapshot_path(peer, number).write_bytes(b"snapshot")
        prune(store, [], received_from=number - 1)
    assert store.received_rounds(1) == [18, 19]
    assert store.received_rounds(2) == [5, 6]
    assert {path.name for path in (store.root / "received/000006").iterdir()} == {"2.json", "2.safetensors"}
    assert len(list((store.root / "received").iterdir())) == 4


def test_received_files_are_told_apart_by_peer_and_round(store: Store) -> None:
    places = {
        path(peer, number)
        for path in (store.received_manifest_path, store.received_snapshot_path)
        for peer in (1, 2)
        for number in (0, 1)
    }
    assert len(places) == 8


def test_the_best_round_is_saved_and_loaded(store: Store) -> None:
    assert store.load_best() == BestRound()
    store.save_best(BestRound(3, 0.75))
    store = reopened(store)
    assert store.load_best() == BestRound(3, 0.75)
    store.close()


def test_the_result_is_written_whole(store: Store) -> None:
    assert store.result() is None
    result = PeerResult(
        id=0,
        arch="cnn6",
        train_samples=5,
        rounds_completed=9,
        snapshot_sha256="ab",
        best_round=4,
        seconds=Seconds(train=1.5),
    )
    store.save_result(result)
    tree = json.loads((store.root / "result.json").read_text())
    assert PeerResult.from_json(tree) == result == store.result()
    assert not list(store.root.glob("*.partial"))


def test_a_round_that_is_half_deleted_is_never_seen(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        commit(store, number)

    def killed(path: Path) -> None:
        (path / MANIFEST).unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            prune(store, [2, 1], received_from=0)
    assert store.kept_rounds() == [1, 2]
    store = reopened(store)
    assert store.kept_rounds() == [1, 2]
    assert not list(store.root.glob("rounds/.*"))
    store.close()


def test_the_first_evidence_of_a_round_stays(store: Store) -> None:
    first = Conflict(2, 5, "a" * 64, "its own manifest", "b" * 64, "taught round 6 of peer 1")
    path = store.save_conflict(first, {"peer 1, round 6": "{}"})
    assert store.save_conflict(replace(first, second="c" * 64), {}) == path
    tree = json.loads(path.read_text())
    assert (tree["peer"], tree["round"], tree["second"]) == (2, 5, "b" * 64)
    assert tree["manifests"] == {"peer 1, round 6": "{}"}
    other = store.save_conflict(replace(first, round=6), {})
    assert store.conflicts() == [path, other]


# --- damage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        (SNAPSHOT_FILE, b"another", "snapshot.safetensors does not have the digest that manifest.json says"),
        (SNAPSHOT_FILE, None, "snapshot.safetensors: No such file or directory"),
        (CHECKPOINT_FILE, None, "checkpoint.safetensors: No such file or directory"),
        (CHECKPOINT_FILE, b"another", "checkpoint.safetensors does not have the digest that record.json says"),
        ("manifest.json", None, "manifest.json: No such file or directory"),
        ("manifest.json", b"{}", "manifest.json or record.json: manifest field run: Field required"),
        ("record.json", None, "record.json: No such file or directory"),
        ("record.json", b'{"peer": 0', "manifest.json or record.json: "),
        ("record.json", b"{}", "manifest.json or record.json: "),
    ],
)
@pytest.mark.parametrize("number", [0, 1])
def test_a_damaged_round_is_named_whichever_it_is(
    store: Store, number: int, name: str, content: bytes | None, reason: str
) -> None:
    for each in (0, 1):
        staging = store.staging_dir(each)
        (staging / SNAPSHOT_FILE).write_bytes(b"snapshot")
        (staging / CHECKPOINT_FILE).write_bytes(b"")
        digest = hashlib.sha256(b"snapshot").hexdigest()
        store.commit(staging, manifest_of(each).model_copy(update={"sha256": digest}), record_of(each))
    store.check_rounds()
    store = reopened(store)
    path = store.round_dir(number) / name
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    if name == CHECKPOINT_FILE and number == 0:  # training goes on from round 1
        store.check_rounds()
        store.close()
        return
    with pytest.raises(IncompleteError, match="--recover") as raised:
        store.check_rounds()
    assert str(raised.value).startswith(f"{store.round_dir(number)} is damaged ({reason}")
    store.close()


def test_what_an_operator_puts_beside_the_rounds_is_left_alone(store: Store) -> None:
    for number in range(3):
        commit(store, number)
    for place in ("rounds", "received"):
        (store.root / place / "000001.bak").mkdir()
        (store.root / place / ".DS_Store").touch()
        (store.root / place / "7").touch()
    assert store.kept_rounds() == [0, 1, 2]
    assert store.received_rounds(1) == []
    prune(store, [2], received_from=2)
    store = reopened(store)
    assert store.kept_rounds() == [2]
    for place in ("rounds", "received"):
        assert {path.name for path in (store.root / place).iterdir()} >= {"000001.bak", ".DS_Store", "7"}
    store.close()


@pytest.mark.parametrize("damage", [b"{\n", b"\xff\xfe\n", b"[]\n", b"{}\n"])
def test_a_damaged_line_of_history_is_named(store: Store, damage: bytes) -> None:
    for number in (1, 2):
        commit(store, number)
    store.record_history()
    path = store.root / "history.jsonl"
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + damage)
    for read in (store.history, store.record_history, store.rewind_history):
        with pytest.raises(IncompleteError, match=r"history\.jsonl is damaged in line 2; put back a copy"):
            read()
    path.write_bytes(first + second[:7])  # half a line is what a power cut leaves, and no damage
    assert [record.round for record in store.history()] == [1]
    store.record_history()
    assert path.read_bytes() == first + second


def test_a_file_system_without_hard_links(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError("no links here")

    commit(store, 1)
    monkeypatch.setattr(os, "link", refused)
    staging = store.copy_round(1, 5)
    assert (staging / SNAPSHOT_FILE).read_bytes() == (store.round_dir(1) / SNAPSHOT_FILE).read_bytes()


def test_a_snapshot_without_its_manifest_does_not_count_as_one_that_can_be_given_back(store: Store) -> None:
    for number in range(4):
        folder = store.received_manifest_path(1, number).parent
        folder.mkdir()
        store.received_snapshot_path(1, number).write_bytes(b"snapshot")
        if number != 2:
            store.received_manifest_path(1, number).write_text("{}")
    prune(store, [], received_from=4)
    kept = {str(path.relative_to(store.root / "received")) for path in (store.root / "received").glob("*/*")}
    assert kept == {f"{number:06d}/1.{kind}" for number in (1, 3) for kind in ("json", "safetensors")}


# --- lineage ----------------------------------------------------------------------------------------------------------


def received(store: Store, peer: int, number: int) -> Manifest:
    """A manifest of another peer that has been taken, with its snapshot."""
    manifest = manifest_of(number).model_copy(update={"peer": peer})
    store.save_received_manifest(manifest)
    store.received_snapshot_path(peer, number).write_bytes(b"snapshot")
    return manifest


def lineage(store: Store) -> list[tuple[int, int]]:
    """Peer and round of every line, all of which are whole."""
    text = (store.root / "lineage.jsonl").read_bytes()
    assert text == b"" or text.endswith(b"\n")
    found = [Manifest.from_bytes(line) for line in text.splitlines()]
    return [(each.peer, each.round) for each in found]


def everywhere(store: Store) -> set[tuple[int, int]]:
    """Peer and round of every manifest that is anywhere."""
    places = [*store.root.glob("rounds/[0-9]*/manifest.json"), *store.root.glob("received/*/*.json")]
    found = [Manifest.from_bytes(path.read_bytes()) for path in places]
    return {(each.peer, each.round) for each in found} | set(lineage(store))


def test_every_manifest_is_in_the_lineage_or_in_its_place(store: Store) -> None:
    exact = []
    for number in range(8):
        commit(store, number)
        for peer in (1, 2):
            if peer == 1 or number < 2:  # peer 2 goes away: its two newest snapshots stay
                exact.append(received(store, peer, number).to_bytes())
        prune(store, [number, number - 1, 3], received_from=number - 1)
    assert everywhere(store) == {(0, n) for n in range(8)} | {(1, n) for n in range(8)} | {(2, 0), (2, 1)}
    assert sorted(lineage(store)) == [*((0, n) for n in (0, 1, 2, 4, 5)), *((1, n) for n in range(6))]
    lines = (store.root / "lineage.jsonl").read_bytes().splitlines()
    assert set(lines) <= {*exact, *(manifest_of(n).to_bytes() for n in range(8))}  # byte for byte


def test_one_write_is_made_durable_before_anything_is_deleted(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        commit(store, number)
        received(store, 1, number)
    done: list[str] = []
    fsync = os.fsync

    def noted(fd: int) -> None:
        fsync(fd)
        done.append(Path(f"/dev/fd/{fd}").resolve().name)
        assert {(0, n) for n in range(5)} | {(1, n) for n in range(5)} == everywhere(store)
        assert store.kept_rounds() == [0, 1, 2, 3, 4]

    monkeypatch.setattr(os, "fsync", noted)
    prune(store, [4, 3], received_from=3)
    assert done == ["lineage.jsonl", "state"]  # the directory once: its name is new
    monkeypatch.undo()
    done.clear()
    monkeypatch.setattr(os, "fsync", lambda fd: done.append(Path(f"/dev/fd/{fd}").resolve().name))
    prune(store, [4], received_from=4)
    assert done == ["lineage.jsonl"]
    prune(store, [4], received_from=4)
    assert done == ["lineage.jsonl"]  # nothing new, nothing written


@pytest.mark.parametrize("kind", ["append", "delete", "unlink"])
def test_a_kill_while_pruning_loses_no_manifest(store: Store, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    for number in range(5):
        commit(store, number)
        received(store, 1, number)
    expected = everywhere_without_lineage(store)

    def killed(*_: object) -> None:
        raise KilledError

    target = {"append": (os, "fsync"), "delete": (shutil, "rmtree"), "unlink": (Path, "unlink")}[kind]
    monkeypatch.setattr(*target, killed)
    with pytest.raises(KilledError):
        prune(store, [4, 3], received_from=4)
    monkeypatch.undo()
    store = reopened(store)
    assert everywhere(store) == expected
    prune(store, [4, 3], received_from=4)  # some come twice
    assert everywhere(store) == expected
    assert len(lineage(store)) > len(set(lineage(store)))
    store.close()


def everywhere_without_lineage(store: Store) -> set[tuple[int, int]]:
    (store.root / "lineage.jsonl").touch()
    return everywhere(store)


@pytest.mark.parametrize("torn", [1, 2, 100, 400])
@pytest.mark.parametrize("by", ["open", "append"])
def test_a_torn_line_of_the_lineage_is_cut_off(store: Store, torn: int, by: str) -> None:
    for number in range(5):
        commit(store, number)
    prune(store, [4, 3, 2], received_from=0)
    path = store.root / "lineage.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-torn])
    if by == "open":
        store = reopened(store)
        assert path.read_bytes() == whole[: whole[:-torn].rfind(b"\n") + 1]
    prune(store, [4, 3], received_from=0)
    assert lineage(store)[-1] == (0, 2)
    store.close()


def test_zeros_after_the_last_line_are_cut_off(store: Store) -> None:
    """As a power cut leaves a file that had become longer; more of them than are read at once."""
    commit(store, 0)
    prune(store, [], received_from=0)
    path = store.root / "lineage.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + bytes(200_000))
    store = reopened(store)
    assert path.read_bytes() == whole
    path.write_bytes(bytes(200_000))
    store = reopened(store)
    assert path.read_bytes() == b""
    store.close()


def test_a_full_disk_deletes_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        commit(store, number)

    def full(_fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        prune(store, [2], received_from=0)
    assert store.kept_rounds() == [0, 1, 2]


def test_what_is_set_aside_or_replaced_goes_into_the_lineage(store: Store) -> None:
    commit(store, 0)
    first = received(store, 1, 0)
    store.save_received_manifest(first)  # the same again
    assert not (store.root / "lineage.jsonl").exists()
    store.save_received_manifest(first.model_copy(update={"sha256": "f" * 64}))
    store.set_aside(0)
    lines = (store.root / "lineage.jsonl").read_bytes().splitlines()
    assert [Manifest.from_bytes(line) for line in lines] == [first, manifest_of(0)]


def test_a_damaged_manifest_does_not_get_into_the_lineage(store: Store) -> None:
    for number in range(3):
        commit(store, number)
    (store.round_dir(0) / MANIFEST).write_bytes(b"\x00" * 90)
    (store.round_dir(1) / MANIFEST).write_bytes(manifest_of(1).to_bytes().replace(b",", b",\n"))
    prune(store, [2], received_from=0)
    assert (store.root / "lineage.jsonl").read_bytes() == manifest_of(1).to_bytes() + b"\n"


def test_manifests_that_a_round_names_are_durable_before_it_is_committed(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Afterwards nobody would fetch them again, and its lineage would have a gap."""
    commit(store, 0)
    used = [received(store, peer, 0) for peer in (1, 2)]
    done: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def noted_rename(path: Path, target: Path) -> Path:
        done.append("rename")
        return rename(path, target)

    def noted_fsync(fd: int) -> None:
        done.append(str(Path(f"/dev/fd/{fd}").resolve().relative_to(store.root)))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "rename", noted_rename)
    consumed = tuple(Consumed(peer=each.peer, round=0, sha256=each.sha256) for each in used)
    gone = Consumed(peer=3, round=0, sha256="f" * 64)  # as when a lost round has come back
    staging = store.copy_round(0, 1)
    store.commit(staging, manifest_of(1).model_copy(update={"consumed": (*consumed, gone)}), record_of(1))
    names = {"received/000000/1.json", "received/000000/2.json", "received/000000", "received"}
    assert names <= set(done[: done.index("rename")])
