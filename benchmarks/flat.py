"""Does anything grow with the rounds? Runs a mesh of tiny models and prints how its processes' resources change.

    python benchmarks/flat.py                          # ten peers, 200 rounds: some minutes on two cores
    python benchmarks/flat.py --count 3 --rounds 60

Sampled are, of every service and learner, resident memory, open files and threads, and of every state directory the
bytes of models (rounds/, received/, scratch/) and of texts: history.jsonl, a line a round, and the recorded events,
which are cut off at one megabyte. lineage.jsonl is meant to grow, by one manifest a peer and round, and is held to
that. The first third of the rounds, in which allocators and caches fill up, is left out. The slope is that of a
least-squares line; the growth is from the mean of the second third to that of the last. Ends with 1 if something grows.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import numpy as np

#: What may be left of the growth over a third of 200 rounds, and why: resident memory is noisy by some pages; a learner
#: has a teacher's file open now and then, the more often the busier the machine, and a service a connection; its six
#: threads for files begin when they are needed; a line of history has 700 bytes, and events fill their megabyte in the
#: first 120 rounds. Whatever is not given back once a round would be 66 after that third.
ALLOWED = {
    "service memory (MB)": 1.5,
    "learner memory (MB)": 4.0,
    "service files": 0.5,
    "learner files": 0.5,
    "service threads": 1.0,
    "learner threads": 0.0,
    "models on disk (MB)": 0.2,
    "texts on disk (MB)": 0.8,
}
#: What lineage.jsonl may grow beyond its share, since samples do not lie evenly over the rounds.
UNEVEN = 1.1

#: Fewer say nothing: caches fill up meanwhile, and samples are too few to lie evenly.
LEAST_ROUNDS = 60

#: By name of the resource: (round, value) of all peers.
Samples = dict[str, list[tuple[int, float]]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=200)
    arguments = parser.parse_args()
    if arguments.rounds < LEAST_ROUNDS:
        parser.error(f"--rounds {arguments.rounds}: what grows can be told from {LEAST_ROUNDS} rounds on")
    with tempfile.TemporaryDirectory() as folder:
        samples = run(arguments.count, arguments.rounds, Path(folder))
        line = max(path.stat().st_size for path in Path(folder).glob("run/peers/*/rounds/*/manifest.json")) + 1
    third = arguments.rounds // 3
    # A manifest and its line break, of every peer, in every round of a third.
    allowed_of = ALLOWED | {"lineage on disk (MB)": UNEVEN * line * arguments.count * third / 1e6}
    print(f"{arguments.count} peers, {arguments.rounds} rounds, from round {third} on")
    print(f"{'':22}{'mean':>10}{'slope per 100 rounds':>22}{'growth':>10}{'allowed':>10}")
    grows = []
    for name, allowed in allowed_of.items():
        settled = np.array([point for point in samples[name] if point[0] >= third])
        slope = 100 * np.polyfit(settled[:, 0], settled[:, 1], 1)[0]
        middle = statistics.mean(value for number, value in samples[name] if third <= number < 2 * third)
        growth = statistics.mean(value for number, value in samples[name] if number >= 2 * third) - middle
        print(f"{name:22}{middle:10.2f}{slope:22.3f}{growth:10.3f}{allowed:10.2f}")
        grows += [name] if growth > allowed else []
    print(f"grows: {', '.join(grows)}" if grows else "nothing grows that should not")
    return 1 if grows else 0


def run(count: int, rounds: int, folder: Path) -> Samples:
    """Run the mesh to its end, and sample it again and again."""
    command = [sys.executable, "-P", "-m", "launch", "up", "--count", str(count), "--rounds", str(rounds)]
    command += ["--pool", "cnn6@0.125", "--samples", str(60 * count), "--threads", "1", "--no-alone"]
    samples: Samples = defaultdict(list)
    process = subprocess.Popen([*command, "--out", str(folder / "run")], stdout=subprocess.PIPE, text=True)
    try:
        while process.poll() is None:
            for peer in range(count):
                sample(folder / "run" / "peers" / str(peer), samples)
            time.sleep(0.2)
    finally:
        process.kill()
    assert process.stdout is not None
    if process.returncode:
        sys.exit(process.stdout.read())
    return samples


def sample(state: Path, samples: Samples) -> None:
    """One look at one peer; whatever ends meanwhile is left out."""
    numbers = [int(path.name) for path in state.glob("rounds/[0-9]*")]
    if not numbers:
        return
    try:
        found = {}
        for role in ("service", "learner"):
            proc = Path("/proc", (state / f"{role}.pid").read_text().strip())
            fields = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines())
            found[f"{role} memory (MB)"] = int(fields["VmRSS"].split()[0]) / 1024
            found[f"{role} threads"] = int(fields["Threads"])
            found[f"{role} files"] = len(list((proc / "fd").iterdir()))
        found["models on disk (MB)"] = sum(size(state / name) for name in ("rounds", "received", "scratch")) / 1e6
        texts = {path.name: path.stat().st_size / 1e6 for path in state.glob("*.jsonl")}
        found["lineage on disk (MB)"] = texts.pop("lineage.jsonl", 0.0)
        found["texts on disk (MB)"] = sum(texts.values())
    except (OSError, KeyError, ValueError):
        return
    for name, value in found.items():
        samples[name].append((max(numbers), value))


def size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue
    return total


if __name__ == "__main__":
    sys.exit(main())
