"""What a round costs beside the training: this project, Flower's simulation and p2pfl, on the same shards and model.

    python benchmarks/frameworks.py --flower VENV/bin/python --p2pfl VENV/bin/python --json frameworks.json

Ten clients, one local epoch of cnn6 a round on scikit-learn's digits at 8x8, cut by this project's partition, nobody
distils. The other two need virtual environments of their own, since they want other versions of the same packages:

    python3.11 -m venv ../flower && ../flower/bin/pip install -r benchmarks/frameworks/requirements-flower.txt
    python3.11 -m venv ../p2pfl && ../p2pfl/bin/pip install -r benchmarks/frameworks/requirements-p2pfl.txt

One that is not given is left out. All run in turn, several times. What the epochs and validations take alone, in one
process, is measured in each turn and taken off. The first and the last round do not count for the figures of a round:
the start falls in one; in the other memory is looked at, which costs time, and this project evaluates on a test set.
docs/performance.md says what differs between the three. Linux only; some eight minutes on two idle cores. Ends with 1
if one of them failed. Ray leaves its logs in /tmp/ray.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from process_tree import ProcessTree
from report import in_words, spread, write

from crad_p2p.data.datasets import load_dataset
from crad_p2p.data.partition import make_splits
from crad_p2p.federation import Federation, build_federation
from crad_p2p.results import Summary
from launch.quick import free_addresses

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "frameworks"))

import setting  # noqa: E402

#: Seconds between two looks at CPU time, and at memory in the last round.
CPU_INTERVAL, MEMORY_INTERVAL = 0.2, 0.5
#: Where a process of another framework notes its rounds.
ROUNDS_FILE = "rounds.txt"
#: Seconds after which a run is ended.
PATIENCE = 300.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flower", type=Path, metavar="PYTHON", help="of a virtual environment with Flower")
    parser.add_argument("--p2pfl", type=Path, metavar="PYTHON", help="of a virtual environment with p2pfl")
    parser.add_argument("--p2pfl-protocol", choices=("memory", "grpc"), default="memory")
    parser.add_argument("--rounds", type=int, default=5, help="of which the first and the last do not count (5)")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", nargs="+", help="leave out all but these, by the start of their names")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends what it has started, like Ctrl-C
    if arguments.rounds < 3:
        parser.error("--rounds must be at least 3: the first and the last do not count")
    with tempfile.TemporaryDirectory(prefix="crad-frameworks-") as folder:
        benchmark = Benchmark(Path(folder), arguments.rounds)
        candidates = benchmark.candidates(arguments.flower, arguments.p2pfl, arguments.p2pfl_protocol)
        if arguments.only:
            candidates = [c for c in candidates if c.name.startswith(tuple(arguments.only))]
        figures = measure(benchmark, candidates, arguments.runs)
    write(arguments.json, "frameworks", {**benchmark.described(), **figures})
    return 1 if figures["left_out"] else 0


@dataclass(frozen=True)
class Candidate:
    """One way to run the rounds.

    Attributes:
        command: of its process, to which an empty folder for everything it writes is given.
        result: reads from that folder what it says of itself: ``model_bytes_per_round``, and versions.
        finished: reads from it how many rounds all peers have finished.
        environment: more variables.
    """

    name: str
    command: Callable[[Path], list[str]]
    result: Callable[[Path], dict[str, Any]]
    finished: Callable[[Path], int]
    environment: tuple[tuple[str, str], ...] = ()


@dataclass
class Run:
    """What one run took, all processes together. Seconds and bytes."""

    wall: float
    cpu: float
    wall_per_round: float
    cpu_per_round: float
    peak_pss_bytes: int
    result: dict[str, Any]


class Benchmark:
    """The setting, and one run of a candidate in it."""

    def __init__(self, folder: Path, rounds: int) -> None:
        self.rounds = rounds
        self._folder = folder
        self._shards = folder / "shards"
        self._runs = 0
        self.images = self._write_shards()

    def candidates(self, flower: Path | None, p2pfl: Path | None, protocol: str) -> list[Candidate]:
        """Those that can be run here."""
        hook = (("PYTHONPATH", os.pathsep.join([str(HERE / "frameworks" / "without_teachers"), str(HERE.parent)])),)
        found = [
            Candidate("crad-p2p, models exchanged", self._mesh, partial(self._summary, False), committed, hook),
            Candidate("crad-p2p, with teachers", self._mesh, partial(self._summary, True), committed),
        ]
        for name, python, script, more in (
            ("Flower", flower, "with_flower.py", ()),
            (f"p2pfl, {protocol}", p2pfl, "with_p2pfl.py", (protocol,)),
        ):
            if python is None:
                option = f"--{name.partition(',')[0].lower()}"
                print(f"{name} is left out: its Python was not given ({option}; see --help)")
            elif not os.access(python, os.X_OK):
                print(f"{name} is left out: {python} cannot be run; --help says how to make its virtual environment")
            else:
                found.append(Candidate(name, self._foreign(python.absolute(), script, more), read_result, noted))
        return found

    def described(self) -> dict[str, Any]:
        """The setting, for the report."""
        return {
            "rounds": self.rounds,
            "peers": setting.PEERS,
            "arch": setting.ARCH,
            "training_images": self.images,
            "image": [1, 8, 8],
            "batch_size": setting.BATCH,
            "threads_of_a_client": 1,
        }

    def alone(self) -> tuple[float, float]:
        """CPU seconds a round of all epochs, and of all validations, one after the other in one process."""
        folder = self._new_folder("floor")
        script = HERE / "frameworks" / "alone.py"
        command = [sys.executable, str(script), str(self._shards), str(self.rounds), str(folder / "result.json")]
        subprocess.run(command, check=True, env=environment(folder))
        seconds = read_result(folder)
        return statistics.mean(seconds["train"]), statistics.mean(seconds["validate"])

    def run(self, candidate: Candidate) -> Run:
        """One run, in a process group of its own.

        Raises:
            RuntimeError: it failed; the text has the end of its log.
        """
        folder = self._new_folder(candidate.name.partition(",")[0])
        log = folder / "log.txt"
        started = time.monotonic()
        with log.open("wb") as output:
            process = subprocess.Popen(
                candidate.command(folder),
                cwd=folder,
                env={**environment(folder), **dict(candidate.environment)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        tree = ProcessTree(process.pid)
        try:
            marks = self._watch(candidate, process, tree, folder)
            wall = time.monotonic() - started
            killed = tree.end(10.0)
        finally:
            tree.end(0.0)  # after an error or Ctrl-C; else nothing is left
        if process.returncode or len(marks) < self.rounds:
            raise RuntimeError(
                f"{candidate.name} ended with {process.returncode} after {len(marks)} of {self.rounds} rounds and "
                f"{wall:.0f} s. The end of its log:\n{log.read_text(errors='replace')[-4000:]}"
            )
        if killed:
            print(f"  {candidate.name}: {killed} of its processes did not end by themselves and were killed")
        first, last = marks[0], marks[self.rounds - 2]
        counted = self.rounds - 2
        run = Run(
            wall=wall,
            cpu=tree.series[-1][1],
            wall_per_round=(last - first) / counted,
            cpu_per_round=(tree.cpu_at(last) - tree.cpu_at(first)) / counted,
            peak_pss_bytes=tree.peak_pss_bytes,
            result=candidate.result(folder),
        )
        shutil.rmtree(folder)
        return run

    # --- inside ----------------------------------------------------------------------------------------------------

    def _watch(
        self, candidate: Candidate, process: subprocess.Popen[bytes], tree: ProcessTree, folder: Path
    ) -> list[float]:
        """Until the process ends; the moments at which its rounds were finished."""
        marks: list[float] = []
        start = time.monotonic()
        due = memory_due = start
        while process.poll() is None:
            now = time.monotonic()
            if now >= due:
                tree.sample()
                due = now + CPU_INTERVAL
            if len(marks) >= self.rounds - 1 and now >= memory_due:
                tree.sample_memory()
                memory_due = now + MEMORY_INTERVAL
            marks += [time.monotonic()] * (candidate.finished(folder) - len(marks))
            if now - start > PATIENCE:
                process.kill()
            time.sleep(0.03)
        told = folder / ROUNDS_FILE
        if told.exists():
            marks = [float(line.split()[1]) for line in told.read_text().splitlines()]
        return marks

    def _new_folder(self, name: str) -> Path:
        self._runs += 1
        folder = self._folder / f"{self._runs}-{name.lower()}"
        folder.mkdir()
        return folder

    def _federation(self) -> Federation:
        addresses = free_addresses(setting.PEERS)
        return build_federation(
            {
                "federation": "frameworks",
                "rounds": self.rounds,
                "data": {"dataset": "digits", "augmentation": "none", "partition": {"alpha": 1.0}},
                "training": {
                    "batch_size": setting.BATCH,
                    "learning_rate": setting.LEARNING_RATE,
                    "momentum": setting.MOMENTUM,
                    "weight_decay": setting.WEIGHT_DECAY,
                    "clip_norm": setting.CLIP_NORM,
                    "evaluate_every": self.rounds,
                },
                "peers": [{"id": i, "address": addresses[i], "arch": setting.ARCH} for i in range(setting.PEERS)],
            },
            "the benchmark",
        )

    def _write_shards(self) -> int:
        """The peers' own shards as files for the others; the number of all training images."""
        federation = self._federation()
        dataset = load_dataset(federation.data, seed=federation.seed, data_dir=self._folder)
        splits = make_splits(dataset.train.labels, federation.data, federation.ids, federation.seed)
        self._shards.mkdir()
        for peer, split in splits.items():
            parts = {"train": split.train, "validation": split.validation}
            arrays = {f"{part}_images": dataset.train.images[chosen] for part, chosen in parts.items()}
            arrays |= {f"{part}_labels": dataset.train.labels[chosen] for part, chosen in parts.items()}
            np.savez(self._shards / f"{peer}.npz", **arrays)
        return sum(len(split.train) for split in splits.values())

    def _mesh(self, folder: Path) -> list[str]:
        peers = folder / "peers.yaml"
        peers.write_text(yaml.safe_dump(self._federation().model_dump(mode="json")))
        options = ["--peers", str(peers), "--out", str(folder / "run"), "--threads", "1", "--device", "cpu"]
        return [sys.executable, "-m", "launch", "up", *options]

    def _foreign(self, python: Path, script: str, more: Sequence[str]) -> Callable[[Path], list[str]]:
        def command(folder: Path) -> list[str]:
            paths = (HERE / "frameworks" / script, self._shards, self.rounds, folder / "result.json")
            return [str(python), *map(str, paths), *more]

        return command

    def _summary(self, distils: bool, folder: Path) -> dict[str, Any]:
        lines = (folder / "run" / "history.jsonl").read_text().splitlines()
        taught = {record["target_mass"] is not None for record in map(json.loads, lines) if record["round"]}
        if taught != {distils}:
            raise RuntimeError(
                f"its peers should {'' if distils else 'not '}have distilled in all rounds: it is broken"
            )
        summary = Summary.read(folder / "run" / "summary.json")
        return {"model_bytes_per_round": sum(peer.bytes["received"] for peer in summary.peers) / self.rounds}


def committed(folder: Path) -> int:
    """Rounds that every peer of a mesh has on its disk."""
    newest = []
    for peer in range(setting.PEERS):
        rounds = folder / "run" / "peers" / str(peer) / "rounds"
        numbers = [int(name) for name in os.listdir(rounds) if name.isdigit()] if rounds.exists() else []  # noqa: PTH208
        newest.append(max(numbers, default=0))
    return min(newest)


def noted(folder: Path) -> int:
    """Rounds that a process has noted by itself, with the moment of each."""
    told = folder / ROUNDS_FILE
    return told.read_text().count("\n") if told.exists() else 0


def read_result(folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


def environment(folder: Path) -> dict[str, str]:
    """Of every process: this project importable, nothing sent anywhere, what it writes below its home in the folder."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("CRAD_", "PYTHON"))}
    return {
        **inherited,
        "PYTHONPATH": str(HERE.parent),
        "HOME": str(folder),
        "BENCHMARK_ROUNDS": str(folder / ROUNDS_FILE),
        "OMP_NUM_THREADS": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
    }


def measure(benchmark: Benchmark, candidates: Sequence[Candidate], count: int) -> dict[str, Any]:
    """All candidates in turn, several times; prints, and returns the figures."""
    failed: set[str] = set()
    runs: dict[str, list[Run]] = {candidate.name: [] for candidate in candidates}
    floors: list[tuple[float, float]] = []
    for turn in range(count):
        floors.append(benchmark.alone())
        for candidate in candidates:
            if candidate.name in failed:
                continue
            try:
                run = benchmark.run(candidate)
            except RuntimeError as error:
                print(f"{candidate.name} is left out: {error}", file=sys.stderr)
                failed.add(candidate.name)
                continue
            runs[candidate.name].append(run)
            said = f"{run.wall:6.1f} s, {run.cpu:6.1f} CPU s; a round {run.wall_per_round:5.2f} s, "
            print(f"run {turn + 1}: {candidate.name:28} {said}{run.cpu_per_round:5.2f} CPU s", flush=True)
            if incomplete := run.result.get("incomplete_means"):
                print(f"  {incomplete} times a node went on with a mean of fewer than all models", flush=True)
    train, validate = ([floor[index] for floor in floors] for index in (0, 1))
    print(
        f"\n{benchmark.images} training images of {setting.PEERS} peers, {setting.ARCH}, {benchmark.rounds} rounds. "
        f"A round alone takes {in_words(train)} CPU s to train and {in_words(validate)} to validate.\n"
        f"Median (least to greatest) of {count} runs; of a round: without the first and the last.\n"
    )
    header = ("", "s a round", "CPU s a round", "CPU s beside training", "s in all", "CPU s in all", "MB", "MB sent")
    rows = [header]
    figures: dict[str, Any] = {}
    for name, done in runs.items():
        if name in failed:
            continue
        beside = [run.cpu_per_round - sum(floor) for run, floor in zip(done, floors, strict=True)]
        sent = statistics.median(run.result["model_bytes_per_round"] for run in done)
        walls, cpus = [run.wall_per_round for run in done], [run.cpu_per_round for run in done]
        peaks = [float(run.peak_pss_bytes) for run in done]
        totals, total_cpus = [run.wall for run in done], [run.cpu for run in done]
        figures[name] = {
            "wall_seconds_per_round": spread(walls),
            "cpu_seconds_per_round": spread(cpus),
            "cpu_seconds_per_round_beside_training": spread(beside),
            "wall_seconds": spread(totals),
            "cpu_seconds": spread(total_cpus),
            "peak_pss_bytes": spread(peaks),
            "model_bytes_per_round": sent,
            "incomplete_means": sum(run.result.get("incomplete_means", 0) for run in done),
            "versions": done[0].result.get("versions", {"torch": torch.__version__}),
        }
        words = [in_words(walls), in_words(cpus), in_words(beside), in_words(totals, 1), in_words(total_cpus, 1)]
        rows.append((name, *words, f"{statistics.median(peaks) / 1e6:.0f}", f"{sent / 1e6:.0f}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print("MB: largest sum of proportional memory in the last round; MB sent: models, a round.\n")
    return {
        "training_cpu_seconds_per_round": spread(train),
        "validation_cpu_seconds_per_round": spread(validate),
        "candidates": figures,
        "left_out": sorted(failed),
    }


if __name__ == "__main__":
    raise SystemExit(main())
