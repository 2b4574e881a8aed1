"""``crad-mesh compare``: what runs there are, that they are made once and alike, and what the tables say of them."""

from __future__ import annotations

import csv
import json
import os
import select
import subprocess
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from crad_p2p import simulation
from crad_p2p.architectures import layout_of
from crad_p2p.client import Client
from crad_p2p.data.datasets import load_dataset
from crad_p2p.data.partition import make_splits, partition_digest
from crad_p2p.errors import ConfigurationError, DataError, ExitCode, IncompleteError, UsageError
from crad_p2p.results import PeerResult, RoundRecord, Seconds, Summary, mean
from crad_p2p.simulation import simulate
from launch.cli import app
from launch.compare import figures, series, tables
from launch.compare.here import need_of, needs
from launch.compare.plan import Planned, make_plan, numbers
from launch.compare.run import Cost, bytes_sent, perform
from launch.compare.session import Session, find_finished, folder_of, prepare, rounds_done
from launch.compare.tables import Outcome, Spread
from launch.compare.timing import Known, seconds_left
from launch.compare.view import View
from launch.engines import LOG, Began, Ended, Job, Need
from launch.engines.local import Device, LocalEngine, Machine, place
from launch.quick import Quick

TINY = {"rounds": 2, "samples": 200, "pool": "cnn6@0.125"}
NEED = Need(1, 1)


def plan_of(**fields: Any) -> list[Planned]:
    common = {name: fields.pop(name) for name in list(fields) if name in Quick.__annotations__}
    axes: dict[str, Any] = {"methods": ["crad", "local"], "datasets": ["digits"], "seeds": [1], "counts": [3]}
    return make_plan(common=Quick(**{**TINY, **common}), **{**axes, **fields})


# --- what runs there are ----------------------------------------------------------------------------------------------


def test_what_a_method_needs_may_be_in_the_settings_file() -> None:
    plan = plan_of(methods=["crad", "fedgd"], rounds=9, settings={"method": {"fedgd": {"first": 3}}})
    assert [each.federation.method.fedgd and each.federation.method.fedgd.first for each in plan] == [None, 3]
    with pytest.raises(ConfigurationError, match=r"^the command line: method\.fedgd\.first: images are first made"):
        plan_of(methods=["fedgd"], rounds=9)
    with pytest.raises(
        ConfigurationError, match=r"^--settings: data\.transfer_samples: it.*; in the run of method fedmd$"
    ):
        plan_of(methods=["fedmd"], settings={"training": {"evaluate_every": 5}})
    with pytest.raises(ConfigurationError, match=r"^the command line: method\.name: method 'fedm' is unknown"):
        plan_of(methods=["fedm"], settings={"training": {"evaluate_every": 5}})


def test_every_method_meets_every_data_set_seed_and_size_and_whole_tables_come_early() -> None:
    plan = plan_of(seeds=[1, 2], counts=[3, 4], participation=2)
    assert [planned.name for planned in plan] == [
        f"digits-n{peers}of2-{method}-s{seed}" for seed in (1, 2) for peers in (3, 4) for method in ("crad", "local")
    ]
    assert {planned.setting for planned in plan} == {("digits", 3, 2), ("digits", 4, 2)}
    assert len({planned.federation.digest() for planned in plan}) == len(plan)


def test_all_methods_have_the_same_shards_schedule_and_settings() -> None:
    plan = plan_of(methods=["crad", "uniform", "dfml", "local"], seeds=[1, 2], counts=[4], participation=2)
    shards: dict[int, set[str]] = {}
    for planned in plan:
        federation = planned.federation
        labels = load_dataset(federation.data, seed=federation.seed, data_dir=Path()).train.labels
        splits = make_splits(labels, federation.data, federation.ids, federation.seed)
        shards.setdefault(planned.seed, set()).add(partition_digest(labels, splits))
    assert [len(found) for found in shards.values()] == [1, 1]
    assert shards[1] != shards[2]
    for seed in (1, 2):
        of_seed = [planned.federation for planned in plan if planned.seed == seed]
        assert len({tuple(each.active(number) for number in (1, 2)) for each in of_seed}) == 1
        others = [{k: v for k, v in each.agreed().items() if not k.startswith("method.")} for each in of_seed]
        assert all(each == others[0] for each in others)


def test_what_stands_in_the_settings_file_goes_to_all_runs_but_a_methods_section_to_that_one() -> None:
    settings = {"method": {"temperature": 2.0, "dfml": {"period": 4}}, "training": {"evaluate_every": 1}}
    crad, dfml = plan_of(methods=["crad", "dfml"], settings=settings)
    assert [each.federation.method.temperature for each in (crad, dfml)] == [2.0, 2.0]
    assert crad.federation.method.dfml is None
    assert dfml.federation.method.dfml is not None
    assert dfml.federation.method.dfml.period == 4
    assert crad.federation.training.evaluate_every == 1
    assert crad.federation.training.batch_size == 16  # as without the file


def test_a_file_may_be_cut_class_by_class_and_by_groups_side_by_side() -> None:
    plan = plan_of(methods=["crad"], datasets=["npz:d/cells.npz", "npz:d/cells.npz@patient"], alpha=0.7)
    assert [planned.name for planned in plan] == ["cells-n3-crad-s1", "cells_by_patient-n3-crad-s1"]
    assert [planned.dataset for planned in plan] == ["cells", "cells_by_patient"]
    one, other = (planned.federation.data for planned in plan)
    assert one.dataset == other.dataset == f"npz:{Path('d/cells.npz').resolve()}"
    assert (one.partition.kind, one.partition.alpha) == ("dirichlet", 0.7)
    assert other.partition.as_tree() == {"kind": "groups", "by": "patient", "min_size": 10}
    settings = {"data": {"partition": {"min_size": 12}}}
    for planned in plan_of(datasets=["npz:c.npz@x"], settings=settings):
        assert planned.federation.data.partition.min_size == 12


def test_runs_by_groups_have_their_own_shards_and_groups_are_looked_for_before_any_run(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    images, labels = rng.integers(0, 256, (96, 8, 8), dtype=np.uint8), rng.integers(0, 3, 96)
    arrays = {"train_images": images, "train_labels": labels, "test_images": images[:9], "test_labels": labels[:9]}
    file = tmp_path / "cells.npz"
    datasets = [f"npz:{file}", f"npz:{file}@patient"]
    plan = plan_of(methods=["local"], datasets=datasets, rounds=1)
    np.savez(file, **arrays)
    with pytest.raises(DataError, match="must hold the array train_patient"):
        needs(plan, tmp_path, False)
    np.savez(file, **arrays, train_patient=np.arange(96) % 12)
    assert set(needs(plan, tmp_path, False)) == {planned.name for planned in plan}
    out = tmp_path / "out"
    out.mkdir()
    session = make(plan, out, Here())
    one, other = session.outcomes()
    assert one.cost.partition != other.cost.partition
    data = plan[1].federation.data
    train = load_dataset(data, seed=1, data_dir=tmp_path).train
    splits = make_splits(train.labels, data, range(3), 1, train.groups)
    assert other.cost.partition == partition_digest(train.labels, splits, groups=train.groups)
    assert "| cells_by_patient, 3 peers | local |" in (out / "results.md").read_text()


def test_a_transfer_set_is_cut_out_for_all_methods() -> None:
    plan = plan_of(methods=["crad", "fedmd"], transfer_samples=50)
    assert [each.federation.data.transfer_samples for each in plan] == [50, 50]


def test_the_command_has_no_peers_file_in_its_help_and_the_others_do() -> None:
    said = {name: CliRunner().invoke(app, [name, "--help"]).output for name in ("compare", "up")}
    assert "Settings of all runs" in said["compare"]
    assert "--transfer-samples" in said["compare"]
    assert "--peers" not in said["compare"]
    assert "Quick settings, instead of --peers" in said["up"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"settings": {"data": {"transfer_samples": 3}}}, "what decides it is --transfer-samples"),
        ({"seeds": [1, 1]}, "--seeds: 1 is given twice"),
        ({"datasets": ["npz:a/x.npz", "npz:b/x.npz"]}, "would both be called x"),
        ({"datasets": ["npz:a/x.npz@p", "npz:b/x_by_p.npz"]}, "would both be called x_by_p"),
        (
            {"datasets": ["npz:a.npz@p", "npz:b.npz@p"], "alpha": 0.3},
            "--alpha 0.3 with --dataset npz:a.npz@p, npz:b.npz@p: alpha is of the Dirichlet draw.*leave out --alpha",
        ),
        ({"settings": {"data": {"partition": {"kind": "groups"}}}}, r"'data\.partition\.kind' is not .* npz:PATH@BY"),
        ({"settings": {"data": {"samples": 3}}}, "'data.samples' is not for this file; what decides it is --samples"),
    ],
)
def test_a_plan_that_would_be_ambiguous_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        plan_of(**changes)


def test_a_wrong_setting_names_its_file_and_the_method() -> None:
    with pytest.raises(ConfigurationError, match=r"mine\.yaml: 'training\.batch' is not a field.*method crad"):
        plan_of(settings={"training": {"batch": 3}}, source="mine.yaml")
    with pytest.raises(UsageError, match="--seeds 1,x: expected whole numbers"):
        numbers("1,x", "--seeds")


# --- how many at once -------------------------------------------------------------------------------------------------


def test_there_are_as_many_runs_as_cores_and_memory_allow() -> None:
    cpu = (Device("cpu"),)
    one = (Need(40, 0), "cpu")
    assert place(Machine(2, 100, cpu), [], Need(1000, 0), None) == "cpu"  # nobody else will ever make room
    assert place(Machine(2, 100, cpu), [one], Need(40, 0), None) == "cpu"
    assert place(Machine(2, 100, cpu), [one], Need(60, 0), None) is None
    assert place(Machine(2, 1000, cpu), [one, one], Need(40, 0), None) is None
    assert place(Machine(2, None, cpu), [one], Need(60, 0), None) == "cpu"
    assert place(Machine(2, 100, cpu), [one, one], Need(60, 0), 3) == "cpu"
    assert place(Machine(2, 100, cpu), [one, one, one], Need(0, 0), 3) is None


def test_runs_spread_over_gpus_as_far_as_their_memory_goes() -> None:
    gpus = Machine(8, None, (Device("cuda:0", 100), Device("cuda:1", 300)))
    first, second = (Need(0, 80), "cuda:0"), (Need(0, 80), "cuda:1")
    assert place(gpus, [first], Need(0, 80), None) == "cuda:1"
    assert place(gpus, [first, second], Need(0, 80), None) == "cuda:1"
    assert place(gpus, [first, second, second, second], Need(0, 80), None) is None


def test_the_estimate_grows_with_peers_and_models() -> None:
    few, many = (plan_of(methods=["uniform"], counts=[count])[0].federation for count in (3, 30))
    large = plan_of(methods=["uniform"], pool="resnet18")[0].federation
    images = load_dataset(few.data.model_copy(update={"samples": None}), seed=1, data_dir=Path())
    needs = [need_of(federation, images).host for federation in (few, many, large)]
    small = sum(spec.nbytes for spec in layout_of("cnn6@0.125", classes=10, channels=1).values())
    assert needs[1] - needs[0] == 27 * 6 * small  # model, momentum, gradients, and three snapshots
    assert needs[2] - needs[0] > 3 * 6 * 44_000_000


# --- processes --------------------------------------------------------------------------------------------------------


def stuck_jobs(folder: Path, count: int) -> list[Job]:
    """Runs that never begin: nobody writes to the pipe that they read."""
    jobs = []
    for number in range(count):
        mine = folder / str(number)
        mine.mkdir()
        os.mkfifo(mine / "peers.yaml")
        jobs.append(Job(str(number), mine, folder, "float32", NEED))
    return jobs


def wait_for_end(pids: Sequence[int]) -> None:
    for pid in pids:
        try:
            end = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            assert select.select([end], [], [], 30)[0], f"{pid} is still there"
        finally:
            os.close(end)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends children with their parent")
def test_nothing_is_left_of_a_comparison_that_was_killed(tmp_path: Path) -> None:
    stuck_jobs(tmp_path, 2)
    code = """
import os, signal, sys
from pathlib import Path
from launch.engines import Job, Need
from launch.engines.local import Device, LocalEngine, Machine
folder = Path(sys.argv[1])
jobs = [Job(name, folder / name, folder, "float32", Need(1, 1)) for name in "01"]
happenings = LocalEngine(Machine(2, None, (Device("cpu"),))).run(jobs)
next(happenings)
print(Path(f"/proc/self/task/{os.getpid()}/children").read_text(), flush=True)
signal.pause()
"""
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as parent:
        try:
            assert parent.stdout is not None
            pids = [int(word) for word in parent.stdout.readline().split()]
            assert len(pids) == 2
        finally:
            parent.kill()
    wait_for_end(pids)
    assert [log.read_text() for log in tmp_path.glob(f"*/{LOG}")] == ["", ""]  # they did not end by themselves


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_an_engine_that_is_closed_ends_what_it_has_begun(tmp_path: Path) -> None:
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    before = children.read_text().split()
    happenings = LocalEngine(Machine(2, None, (Device("cpu"),))).run(stuck_jobs(tmp_path, 3))
    assert [(type(each), each.job.name) for each in next(happenings)] == [(Began, "0"), (Began, "1")]
    begun = [Path("/proc", pid) for pid in children.read_text().split() if pid not in before]
    assert len(begun) == 2
    happenings.close()
    assert not any(process.exists() for process in begun)


# --- one run ----------------------------------------------------------------------------------------------------------


class Here:
    """An engine in this process: makes each run, or fails as it is told.

    Args:
        failing: exit code and last words, by run.
    """

    def __init__(self, failing: dict[str, tuple[int, str]] | None = None) -> None:
        self.made: list[str] = []
        self.failing = failing or {}

    def run(self, jobs: Sequence[Job]) -> Generator[Sequence[Began | Ended], None, None]:
        for job in jobs:
            yield [Began(job, "cpu")]
            code, words = self.failing.get(job.name, (0, ""))
            (job.folder / LOG).write_text(f"something before\n{words}\n")
            if code == 0:
                perform(job.folder, data_dir=job.data_dir, device="cpu", precision=job.precision)
                self.made.append(job.name)
            yield [Ended(job, code)]


def make(plan: list[Planned], out: Path, engine: Here) -> Session:
    found = find_finished(plan, out)
    session = Session(plan, found, out, "crad-mesh compare --of 'a test'")
    jobs = [Job(each.name, prepare(each, out), out, "float32", NEED) for each in plan if each.name not in found]
    with (out / "said.txt").open("a") as said:
        session.make(jobs, engine, Console(file=said, force_terminal=False))
    return session


def test_a_run_is_the_simulation_of_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (planned,) = plan_of(methods=["crad"])
    published = []
    manifest = simulation.Manifest

    def spy(**fields: Any) -> Any:
        published.append((fields["peer"], fields["size"]))
        return manifest(**fields)

    monkeypatch.setattr(simulation, "Manifest", spy)
    folder = prepare(planned, tmp_path)
    perform(folder, data_dir=tmp_path, device="cpu", precision="float32")
    summary = Summary.read(folder / "summary.json")
    images = load_dataset(planned.federation.data, seed=1, data_dir=tmp_path)
    expected, history = simulate(planned.federation, images, device=torch.device("cpu"), threads=1)
    assert [peer.snapshot_sha256 for peer in summary.peers] == [peer.snapshot_sha256 for peer in expected.peers]
    lines = (folder / "history.jsonl").read_text().splitlines()
    assert [RoundRecord.from_line(line).snapshot_sha256 for line in lines] == [each.snapshot_sha256 for each in history]
    assert {path.name for path in folder.iterdir()} == {"peers.yaml", "summary.json", "history.jsonl", "cost.json"}
    cost = Cost.read(folder / "cost.json")
    sizes = dict(published)
    assert cost.bytes_sent == 2 * mean(sizes.values())  # to both of the others
    assert cost.cpu_seconds > 0


def test_bytes_are_those_to_the_peers_that_are_active_beside_it() -> None:
    all_of_four = plan_of(methods=["crad"], counts=[4])[0].federation
    two_of_four = plan_of(methods=["crad"], counts=[4], participation=2)[0].federation
    alone = plan_of(methods=["local"], counts=[4])[0].federation
    every, some, none = (
        bytes_sent(each, classes=10, image_shape=(1, 8, 8)) for each in (all_of_four, two_of_four, alone)
    )
    assert (every / 3, none) == (some, 0.0)


@pytest.mark.parametrize("method", ["fedmd", "fedgd", "dfml"])
def test_bytes_of_what_is_no_model_are_the_mean_over_the_rounds(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    own = {"first": 1, "every": 3, "images": 8, "steps": 1}
    settings = {"method": {"fedgd": own, "dfml": {"mode": "aggregator"}}}
    planned = plan_of(methods=[method], rounds=5, transfer_samples=20, settings=settings)[0]
    published: list[int] = []
    real = Client.snapshot

    def note(client: Client) -> bytes:
        snapshot = real(client)
        published.extend([len(snapshot)] if client.round else [])
        return snapshot

    monkeypatch.setattr(Client, "snapshot", note)
    dataset = load_dataset(planned.federation.data, seed=1, data_dir=Path())
    simulate(planned.federation, dataset, device=torch.device("cpu"), threads=1)
    assert len(published) == 5 * 3
    found = bytes_sent(planned.federation, classes=10, image_shape=(1, 8, 8))
    assert found == pytest.approx(2 * mean(published))


def test_what_peers_make_and_say_is_in_the_need_of_a_run() -> None:
    plan = {
        each.method: each.federation
        for each in plan_of(methods=["crad", "fedmd", "fedgd"], rounds=30, transfer_samples=20)
    }
    images = load_dataset(plan["crad"].data.model_copy(update={"samples": None}), seed=1, data_dir=Path())
    crad, fedmd, fedgd = (need_of(plan[name], images).host for name in ("crad", "fedmd", "fedgd"))
    assert fedmd - crad == 3 * (6 * 4 * 20 * 10 + 20 * 64)
    assert fedgd - crad > 3 * (6 * 4 * 500 * 10 + 5 * 500 * 64)


# --- many runs --------------------------------------------------------------------------------------------------------


def test_a_finished_run_is_not_made_again_and_an_interrupted_one_is_from_its_start(tmp_path: Path) -> None:
    plan = plan_of()
    crad, local = (planned.name for planned in plan)
    first = Here()
    make(plan[:1], tmp_path, first)
    assert first.made == [crad]
    interrupted = prepare(plan[1], tmp_path)
    (interrupted / "history.jsonl").write_text((folder_of(tmp_path, plan[0]) / "history.jsonl").read_text())
    assert rounds_done(interrupted) == 2
    assert rounds_done(prepare(plan[1], tmp_path)) == 0
    before = (folder_of(tmp_path, plan[0]) / "summary.json").stat().st_mtime_ns
    second = Here()
    session = make(plan, tmp_path, second)
    assert second.made == [local]
    assert (folder_of(tmp_path, plan[0]) / "summary.json").stat().st_mtime_ns == before
    assert [outcome.planned.name for outcome in session.outcomes()] == [crad, local]
    assert all(record.teachers == () for record in session.outcomes()[1].history)
    said = (tmp_path / "said.txt").read_text().splitlines()
    assert len(said) == 2
    assert said[1].startswith(f"[2/2] {local}: done in ")


def test_a_run_of_other_settings_is_an_error_that_says_which(tmp_path: Path) -> None:
    make(plan_of(methods=["local"]), tmp_path, Here())
    changed = plan_of(methods=["local"], rounds=3)
    with pytest.raises(ConfigurationError, match="rounds is 2 in that run and 3 in this comparison; choose another"):
        find_finished(changed, tmp_path)
    (summary,) = tmp_path.glob("runs/*/summary.json")
    summary.write_text(summary.read_text().replace(plan_of(methods=["local"])[0].federation.digest(), "0" * 64))
    with pytest.raises(ConfigurationError, match=f"config_digest is {'0' * 64}"):
        find_finished(plan_of(methods=["local"]), tmp_path)
    summary.write_text("{")
    with pytest.raises(ConfigurationError, match="its results are damaged"):
        find_finished(plan_of(methods=["local"]), tmp_path)


def test_a_run_that_fails_is_named_at_the_end_and_does_not_keep_the_others(tmp_path: Path) -> None:
    plan = plan_of(methods=["crad", "uniform", "local"])
    engine = Here({plan[0].name: (10, "training diverged"), plan[1].name: (-9, "")})
    session = make(plan, tmp_path, engine)
    assert engine.made == [plan[2].name]
    with pytest.raises(IncompleteError) as caught:
        session.complain()
    assert f"2 of 3 runs failed: {plan[0].name} (training diverged); {plan[1].name} (ended by signal 9" in str(
        caught.value
    )
    assert caught.value.exit_code == ExitCode.INCOMPLETE
    text = (tmp_path / "results.md").read_text()
    assert "**2 runs are missing**" in text
    assert "| crad | – | – |" in text


def test_what_an_engine_knows_of_a_failure_counts_more_than_the_last_line(tmp_path: Path) -> None:
    class Losing(Here):
        def run(self, jobs: Sequence[Job]) -> Generator[Sequence[Began | Ended], None, None]:
            for job in jobs:
                (job.folder / LOG).write_text("all is well\n")
                yield [Began(job, "cpu"), Ended(job, 9, "its node was lost")]

    with pytest.raises(IncompleteError, match=r"digits-n3-crad-s1 \(its node was lost\)"):
        make(plan_of(methods=["crad"]), tmp_path, Losing()).complain()


def test_the_command_makes_runs_by_processes_and_writes_every_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "can_draw", lambda: False)
    (tmp_path / "settings.yaml").write_text("training: {evaluate_every: 1}\n")
    options = ["--seeds", "1", "--count", "3", "--rounds", "2", "--samples", "200", "--pool", "cnn6@0.125"]
    options += ["--settings", str(tmp_path / "settings.yaml"), "--device", "cpu", "--out", str(tmp_path / "out")]
    command = ["crad-mesh", "compare", "--methods", "crad", *options]
    monkeypatch.setattr(sys, "argv", command)
    ended = CliRunner().invoke(app, command[1:])
    assert ended.exit_code == 0, ended.output
    assert "pip install 'crad-p2p[plot]'" in ended.output
    out = tmp_path / "out"
    rows = list(csv.DictReader((out / "results.csv").open()))
    assert [(row["method"], row["peer"]) for row in rows] == [("crad", str(p)) for p in range(3)]
    document = json.loads((out / "results.json").read_text())
    assert document["command"] == " ".join(command)
    summary = Summary.read(out / "runs/digits-n3-crad-s1/summary.json")
    assert document["runs"][0]["global_accuracy"] == summary.mean_global_accuracy
    history = [json.loads(line) for line in (out / "runs/digits-n3-crad-s1/history.jsonl").read_text().splitlines()]
    assert all(record["global_accuracy"] is not None for record in history)
    text = (out / "results.md").read_text()
    assert text.count(" ".join(command)) == text.count("## Table") == 2


# --- tables -----------------------------------------------------------------------------------------------------------


def outcome_of(planned: Planned, accuracy: float, peak: float | None = None, **cost: Any) -> Outcome:
    """A run with accuracies that are easy to reckon with: of peer i, ``accuracy`` + i/100."""
    peers = tuple(
        PeerResult(
            id=i,
            arch="cnn6@0.125",
            train_samples=10 * (i + 1),
            rounds_completed=2,
            snapshot_sha256="",
            global_accuracy=accuracy + i / 100,
            local_accuracy=accuracy / 2,
            global_accuracy_per_class=(0.1, 0.9, 0.5),
            counts=(1, 7, 3) if i else (5, 0, 2),
            best_round=2,
            teacher_precision="float32",
            peak_global_accuracy=peak,
            peak_local_accuracy=peak,
        )
        for i in range(planned.peers)
    )
    history = [
        RoundRecord(
            peer=i, round=number, snapshot_sha256="", validation_accuracy=0.0, global_accuracy=g, seconds=Seconds()
        )
        for number, g in ((1, None), (2, accuracy))
        for i in range(planned.peers)
    ]
    summary = Summary(
        federation="f",
        config_digest=planned.federation.digest(),
        method=planned.method,
        transport="memory",
        rounds=2,
        complete=True,
        best_round=2,
        mean_global_accuracy=mean(peer.global_accuracy for peer in peers),
        mean_local_accuracy=mean(peer.local_accuracy for peer in peers),
        wall_seconds=4.0,
        peers=peers,
    )
    numbers = {"cpu_seconds": 6.0, "wall_seconds": 9.0, "bytes_sent": 2e6, "device": "cpu", "partition": "p"}
    return Outcome(planned, summary, history, Cost(**{**numbers, **cost}))


def test_means_have_a_spread_over_seeds_and_one_seed_has_none() -> None:
    plan = plan_of(methods=["crad", "dfml"], seeds=[1, 2])
    runs = [outcome_of(each, 0.29 + each.seed / 50, 0.5 if each.method == "dfml" else None) for each in plan]
    text = tables.to_markdown(plan, runs, "crad-mesh compare", "1")
    # 0.31 and 0.33, and one hundredth more by the mean of three peers; sample deviation 0.02/√2
    assert "| crad | 33.0 ± 1.4 | 16.0 ± 0.7 |" in text
    assert "| dfml, peak model | 50.0 ± 0.0 | 50.0 ± 0.0 |" in text
    assert "crad, peak" not in text
    assert "(n − 1) over 2 seeds (1, 2)" in text
    assert "| digits, 3 peers | crad | 2 | 2 ± 0 | 3 ± 0 |" in text  # computed: no spread; a third of a round each
    assert "Table 3" not in text
    one = tables.to_markdown(plan[:2], runs[:2], "crad-mesh compare", "1")
    assert "| crad | 32.0 | 15.5 |" in one
    assert "One seed (1), so there is no spread." in one
    partly = tables.to_markdown(plan, runs[:3], "crad-mesh compare", "1")
    assert "| dfml | 32.0 (1 of 2) |" in partly
    assert "**1 run is missing**" in partly


def test_pools_of_several_sizes_have_a_table() -> None:
    plan = plan_of(methods=["crad"], counts=[2, 4], participation=2)
    text = tables.to_markdown(plan, [outcome_of(each, each.peers / 10) for each in plan], "crad-mesh compare", "1")
    assert "| data set | method | 2 peers | 4 peers, 2 active |" in text
    assert "| digits | crad | 20.5 | 41.5 |" in text


def test_a_spread_is_that_of_a_sample() -> None:
    assert Spread.of([1.0, None, 3.0]) == Spread(2.0, 2**0.5, 2)
    assert Spread.of([1.0]) == Spread(1.0, None, 1)
    assert Spread.of([]) == Spread(None, None, 0)


def test_methods_that_learned_from_different_shards_are_not_put_side_by_side() -> None:
    crad, local = plan_of()
    tables.check_equal_shards([outcome_of(crad, 0.1), outcome_of(local, 0.1)])
    with pytest.raises(ConfigurationError, match=f"{crad.name} and {local.name} have learned from different shards"):
        tables.check_equal_shards([outcome_of(crad, 0.1), outcome_of(local, 0.1, partition="q")])


def test_runs_that_were_made_differently_are_remarked_on() -> None:
    crad, local = plan_of()
    text = tables.to_markdown([crad, local], [outcome_of(crad, 0.1), outcome_of(local, 0.1, device="cuda:1")], "c", "1")
    assert "Not all runs are alike: runs were made on cpu or cuda" in text


# --- figures and time -------------------------------------------------------------------------------------------------


def test_classes_are_ordered_by_the_support_of_each_peer() -> None:
    planned = plan_of(methods=["crad"], counts=[2])[0]
    (line,) = series.accuracy_by_support([outcome_of(planned, 0.3)])
    # peer 0 has most of class 0, then 2, then 1; peer 1 of 1, then 2, then 0
    assert [spread.mean for spread in line.y] == pytest.approx([50.0, 50.0, 50.0])
    planned = plan_of(methods=["crad"], counts=[1])[0]
    (line,) = series.accuracy_by_support([outcome_of(planned, 0.3)])
    assert [spread.mean for spread in line.y] == pytest.approx([10.0, 50.0, 90.0])
    assert line.x == (1, 2, 3)


def test_curves_have_the_rounds_that_were_tested() -> None:
    plan = plan_of(methods=["crad"], seeds=[1, 2])
    (line,) = series.learning_curves([outcome_of(each, each.seed / 10) for each in plan])
    assert line.x == (2,)
    assert line.y[0].mean == pytest.approx(15.0)
    assert line.y[0].deviation == pytest.approx(10 / 2**0.5)


def test_clients_have_their_support_and_each_methods_accuracy() -> None:
    found = series.clients([outcome_of(each, 0.1 if each.method == "crad" else 0.2) for each in plan_of()])
    assert [(each.peer, each.train_samples) for each in found] == [(0, 10), (1, 20), (2, 30)]
    assert found[2].accuracy == {"crad": pytest.approx(12.0), "local": pytest.approx(22.0)}


def test_the_same_results_give_the_same_figures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    runs = [outcome_of(each, 0.1) for each in plan_of(seeds=[1, 2])]
    paths = figures.draw(runs, tmp_path / "figures")
    assert [path.name for path in paths] == [f"{kind}-digits-n3.svg" for kind in ("curves", "classes", "clients")]
    before = [path.read_bytes() for path in paths]
    (tmp_path / "figures" / "curves-other-n3.svg").write_text("old")
    assert [path.read_bytes() for path in figures.draw(runs, tmp_path / "figures")] == before
    assert sorted(path.name for path in (tmp_path / "figures").iterdir()) == sorted(path.name for path in paths)


def test_time_left_follows_from_the_rounds_that_are_done() -> None:
    plan = plan_of(methods=["crad", "local"], seeds=[1, 2], rounds=10)
    crad1, local1, crad2, local2 = plan
    assert seconds_left(plan, [], [], 2) is None
    running = [Known(crad1, 5, 50.0), Known(local1, 5, 10.0)]
    # crad has 50 s to go, local 10; then crad2 (100 s) begins after 10, and local2 (20 s) after 50
    assert seconds_left([crad2, local2], running, [], 2) == pytest.approx(110.0)
    # one that has no round yet is as fast as others of its method, and 30 s of it are over
    finished = [Known(crad1, 10, 100.0), Known(local1, 10, 20.0)]
    assert seconds_left([local2], [Known(crad2, 0, 30.0)], finished, 2) == pytest.approx(70.0)


def test_the_rounds_of_a_running_run_are_read_from_its_history(tmp_path: Path) -> None:
    assert rounds_done(tmp_path) == 0
    (tmp_path / "history.jsonl").write_text('{"round": 3}\n{"round": 4}\n{"roun')
    assert rounds_done(tmp_path) == 4


def test_many_failures_for_one_reason_give_one_sentence(tmp_path: Path) -> None:
    plan = plan_of(methods=["local"], seeds=list(range(1, 8)))
    session = make(plan, tmp_path, Here({planned.name: (3, "no such partition") for planned in plan}))
    with pytest.raises(IncompleteError) as caught:
        session.complain()
    assert str(caught.value).count("no such partition") == 1
    assert "digits-n3-local-s5 and 2 more (no such partition)" in str(caught.value)


def test_a_terminal_shows_the_runs_that_go_on(tmp_path: Path) -> None:
    with (tmp_path / "said").open("w") as file:
        console = Console(file=file, force_terminal=True, width=100)
        with View(console, 3, 1) as view:
            view.update([Known(plan_of()[0], 1, 12.0)], 61.0)
        with View(console, 3, 1) as view:
            view.update([], 61.0)
    said = (tmp_path / "said").read_text()
    assert "1 of 3 runs are over; about 61 s left\n" in said
    assert "1 of 3 runs are over; about 61 s left; none goes on, they wait for room\n" in said
    assert "digits-n3-crad-s1" in said
    assert "1 of 2" in said
