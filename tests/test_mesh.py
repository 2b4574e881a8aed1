"""Ten real peers, three kinds of architecture, over gRPC on localhost: the whole product at its smallest."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import Peers, until, up_command

from crad_p2p.errors import ExitCode
from crad_p2p.forking import is_supported
from peer.lock import Lock

ROUNDS = 3
POOL = "resnet18@0.125,resnet18-half@0.125,cnn6@0.125"
QUICK = ["--rounds", str(ROUNDS), "--pool", POOL, "--samples", "600", "--threads", "1", "--seed", "7"]


def mesh(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run crad-mesh as a user would."""
    command = [str(Path(sys.executable).with_name("crad-mesh")), *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=240)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Directories of one mesh and of its simulation."""
    folder = tmp_path_factory.mktemp("runs")
    for command, out in (("up", "mesh"), ("simulate", "simulation")):
        keep = ["--keep-models"] if command == "simulate" else []
        ended = mesh(command, *QUICK, *keep, "--out", out, cwd=folder)
        assert (ended.returncode, ended.stderr) == (0, ""), ended.stdout + ended.stderr
    return folder / "mesh", folder / "simulation"


def summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def test_mesh_and_simulation_publish_the_same_bytes(runs):
    over_grpc, in_memory = map(summary, runs)
    assert over_grpc["transport"] == "grpc"
    assert in_memory["transport"] == "memory"
    assert over_grpc["config_digest"] == in_memory["config_digest"]
    digests = [[(peer["id"], peer["snapshot_sha256"]) for peer in each["peers"]] for each in (over_grpc, in_memory)]
    assert digests[0] == digests[1]
    assert len({digest for _, digest in digests[0]}) == 10
    assert {peer["arch"] for peer in over_grpc["peers"]} == set(POOL.split(","))


def test_mesh_and_simulation_report_the_same_results(runs):
    same = ("rounds", "complete", "best_round", "mean_global_accuracy", "mean_local_accuracy", "method", "federation")
    of_peer = ("train_samples", "rounds_completed", "global_accuracy", "local_accuracy", "counts", "hits")
    over_grpc, in_memory = map(summary, runs)
    for field in same:
        assert over_grpc[field] == in_memory[field], field
    for one, other in zip(over_grpc["peers"], in_memory["peers"], strict=True):
        for field in of_peer:
            assert one[field] == other[field], (one["id"], field)


def test_a_target_is_explained_from_the_snapshots_of_either(runs):
    explained = [mesh("explain", "5", "--run", str(out), "--json", cwd=out) for out in runs]
    assert [(each.returncode, each.stderr) for each in explained] == [(0, ""), (0, "")]
    assert explained[0].stdout == explained[1].stdout
    found = json.loads(explained[0].stdout)
    assert (found["round"], [each["peer"] for each in found["teachers"]]) == (ROUNDS, [*range(1, 10)])


def test_every_peer_was_taught_by_all_others_in_every_round(runs):
    for folder in runs:
        lines = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
        assert [(line["round"], line["peer"]) for line in lines] == [
            (r, p) for r in range(1, ROUNDS + 1) for p in range(10)
        ]
        assert all(line["teachers"] == [p for p in range(10) if p != line["peer"]] for line in lines)
        assert all(line["seconds"]["teachers"] > 0 and line["seconds"]["train"] > 0 for line in lines)
    assert all(
        line["bytes_received"] > 0 for line in map(json.loads, (runs[0] / "history.jsonl").read_text().splitlines())
    )


def test_summary_has_the_promised_fields(runs):
    for folder in runs:
        found = summary(folder)
        assert found["complete"] is True
        assert found["wall_seconds"] > 0
        for peer in found["peers"]:
            assert set(peer["seconds"]) == {"wait", "transfer", "teachers", "train", "validate", "commit"}
            assert set(peer["bytes"]) == {"sent", "received"}
            assert peer["peak_rss_bytes"] > 50_000_000
            assert len(peer["global_accuracy_per_class"]) == len(peer["counts"]) == len(peer["hits"]) == 10
            assert peer["missing_teachers"] == peer["stale_teachers"] == peer["quarantined_teachers"] == []


def test_the_run_stands_beside_the_same_peers_learning_alone(runs):
    alone = summary(runs[0] / "alone")
    assert alone["method"] == "local"
    assert [peer["train_samples"] for peer in alone["peers"]] == [
        peer["train_samples"] for peer in summary(runs[0])["peers"]
    ]


def test_only_two_rounds_and_the_best_stay_on_disk(runs):
    best = summary(runs[0])["best_round"]
    for peer in range(10):
        kept = {int(path.name) for path in (runs[0] / "peers" / str(peer) / "rounds").iterdir()}
        assert kept == {ROUNDS, ROUNDS - 1, best}


def test_a_finished_run_is_shown_again_and_not_repeated(runs):
    before = (runs[0] / "summary.json").stat().st_mtime_ns
    ended = mesh("up", *QUICK, "--out", str(runs[0]), cwd=runs[0])
    assert ended.returncode == 0
    assert "holds the complete run" in ended.stdout
    assert (runs[0] / "summary.json").stat().st_mtime_ns == before


def test_another_federation_is_not_mixed_into_a_directory(runs):
    ended = mesh("up", *QUICK, "--alpha", "0.5", "--out", str(runs[0]), cwd=runs[0])
    assert ended.returncode == 3
    assert "data.partition.alpha is 1.0 in that run and 0.5 in this command" in " ".join(ended.stderr.split())


def test_results_of_a_simulation_are_not_taken_for_those_of_a_mesh(runs):
    ended = mesh("up", *QUICK, "--out", str(runs[1]), cwd=runs[1])
    assert ended.returncode == 3
    assert "holds the results of another run" in " ".join(ended.stderr.split())


def test_the_federation_file_is_never_overwritten(tmp_path):
    assert mesh("init", "peers.yaml", "--count", "2", cwd=tmp_path).returncode == 0
    before = (tmp_path / "peers.yaml").read_text()
    ended = mesh("up", "--peers", "peers.yaml", "--out", ".", cwd=tmp_path)
    assert ended.returncode == 2
    assert "would be overwritten" in " ".join(ended.stderr.split())
    assert (tmp_path / "peers.yaml").read_text() == before
    assert mesh("init", "other.yaml", "--dataset", "nonsense", cwd=tmp_path).returncode == 3
    assert not (tmp_path / "other.yaml").exists()


@pytest.mark.parametrize(
    ("wrong", "code", "said"),
    [
        (["--precision", "fp16"], ExitCode.USAGE, "--precision fp16: use auto, float32 or bfloat16"),
        (["--device", "gpu"], ExitCode.USAGE, "--device gpu: there is no such kind of device; use auto, cpu, "),
        (["--count", "30", "--samples", "200"], ExitCode.CONFIGURATION, "data.partition: min_size 10 for each of 30 "),
        (["--dataset", "npz:none.npz"], ExitCode.DATA, "none.npz: not found; "),
    ],
    ids=["precision", "device", "shards", "data"],
)
def test_what_cannot_be_is_said_before_anything_is_written_or_started(tmp_path, wrong, code, said):
    ended = mesh("up", *wrong, "--out", "run", cwd=tmp_path)
    assert ended.returncode == code
    assert ended.stdout == ""
    assert "peer" not in ended.stderr.partition(": ")[2].partition(":")[0]  # it is nobody's fault
    assert said in " ".join(ended.stderr.split())
    assert not any(tmp_path.iterdir())


def test_one_mesh_a_directory(tmp_path):
    (tmp_path / "taken").mkdir()
    lock = Lock(tmp_path / "taken" / "lock")
    lock.take("", "")
    try:
        second = mesh("up", *QUICK, "--no-alone", "--out", "taken", cwd=tmp_path)
    finally:
        lock.release()
    assert second.returncode == 5
    assert f"a mesh is already running in {tmp_path / 'taken'} (process {os.getpid()})" in second.stderr


def test_killed_and_stopped_a_run_continues_to_the_same_bytes(tmp_path):
    small = ["--count", "3", "--rounds", "8", "--pool", "cnn6@0.125", "--samples", "300", "--threads", "1"]
    assert mesh("simulate", *small, "--out", "expected", cwd=tmp_path).returncode == 0
    command = [str(Path(sys.executable).with_name("crad-mesh")), "up", *small, "--no-alone", "--out", "run"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        lines = []
        for line in process.stdout:  # type: ignore[union-attr]
            lines.append(line)
            if line.startswith("round 1 of"):
                learners = [int((tmp_path / f"run/peers/{peer}/learner.pid").read_text()) for peer in range(3)]
                parents = {_parent(learner) for learner in learners} if is_supported() else {0}
                for name, peer in (("service", 2), ("learner", 0)):
                    os.kill(int((tmp_path / f"run/peers/{peer}/{name}.pid").read_text()), signal.SIGKILL)
            elif line.startswith("round 3 of"):
                process.send_signal(signal.SIGINT)
        process.wait(timeout=60)
    finally:
        process.kill()
    output = "".join(lines)
    assert process.returncode == 9, output
    assert "peer 2 was killed by SIGKILL; starting it again" in output
    log = (tmp_path / "run/peers/0/log.txt").read_text()
    assert "the learner process was killed by SIGKILL; starting it again" in log
    assert "run the same command again to continue" in " ".join(output.split())
    assert len(parents) == 1  # all are forked by one process
    stopped = summary(tmp_path / "run")
    assert stopped["complete"] is False
    assert min(peer["rounds_completed"] for peer in stopped["peers"]) >= 3

    ended = mesh("up", *small, "--no-alone", "--out", "run", cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    expected, found = summary(tmp_path / "expected"), summary(tmp_path / "run")
    assert [p["snapshot_sha256"] for p in found["peers"]] == [p["snapshot_sha256"] for p in expected["peers"]]
    history = [json.loads(line) for line in (tmp_path / "run/history.jsonl").read_text().splitlines()]
    assert len(history) == 3 * 8  # no round was trained twice


def test_a_peer_whose_state_directory_is_removed(request: pytest.FixtureRequest) -> None:
    """Nobody can read any more why it ended."""
    make: Callable[..., Peers] = request.getfixturevalue("mesh")
    peers = make(2, rounds=4)
    peers.tell("hold", 2)
    process = subprocess.Popen(**up_command(peers), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    removed = peers.folder / "out/peers/1"
    logs = [peers.folder / f"out/peers/{i}/log.txt" for i in range(2)]
    try:
        until(lambda: all(log.exists() and "round 1 of 4 is published" in log.read_text() for log in logs), "round 1")
        while removed.exists():  # it may just be writing there
            shutil.rmtree(removed, ignore_errors=True)
        peers.tell("hold", None)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 9, output
    assert output.splitlines()[-1] == (
        f"crad-mesh: peer 1 ended: exit code 9; its log {removed / 'log.txt'}, which should say why, cannot be read "
        f"(No such file or directory): see what became of {removed}"
    )


def test_no_process_is_left_behind(runs):
    for path in runs[0].glob("peers/*/*.pid"):
        pid = int(path.read_text())
        deadline = time.monotonic() + 10
        while _runs(pid, runs[0]) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not _runs(pid, runs[0]), path


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.skipif(not is_supported(), reason="the system does not offer it")
def test_when_the_fork_server_is_killed_the_run_goes_on(tmp_path):
    small = ["--count", "3", "--rounds", "6", "--pool", "cnn6@0.125", "--samples", "300", "--threads", "1"]
    assert mesh("simulate", *small, "--out", "expected", cwd=tmp_path).returncode == 0
    command = [str(Path(sys.executable).with_name("crad-mesh")), "up", *small, "--no-alone", "--out", "run"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        for line in process.stdout:  # type: ignore[union-attr]
            if line.startswith("round 1 of"):
                os.kill(_parent(int((tmp_path / "run/peers/0/learner.pid").read_text())), signal.SIGKILL)
        process.wait(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0
    for peer in range(3):
        log = (tmp_path / f"run/peers/{peer}/log.txt").read_text()
        assert "the learner process was killed by SIGKILL; starting it again" in log
        assert "the learner is not forked ([Errno 111] Connection refused); it is started like any other process" in log
    expected, found = summary(tmp_path / "expected"), summary(tmp_path / "run")
    assert [p["snapshot_sha256"] for p in found["peers"]] == [p["snapshot_sha256"] for p in expected["peers"]]
    assert list((tmp_path / "run").glob("fork-server*")) == []


def _runs(pid: int, folder: Path) -> bool:
    """Whether that process is alive and is one of this run's (ids are reused)."""
    try:
        return str(folder) in Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return False
