"""The rounds of a real mesh against the computing in them: what do barrier, transfer and disk cost?

    python benchmarks/round_time.py                                   # ten peers on digits
    python benchmarks/round_time.py --data ../data/cifar10.npz --samples 4000

One run of ``crad-mesh up``: from the moment at which all peers have committed a round, over some rounds, are taken the
wall time and the CPU seconds of all learners. The ratio is the wall time over those CPU seconds divided by the cores:
1.0 would be a mesh whose services cost nothing and which never leaves a core idle. It runs several times.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from meshes import CORES, check, cpu_seconds, mesh, pids, rounds
from report import in_words, spread, write


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="an npz file, in place of digits")
    parser.add_argument("--samples", type=int, default=4000, help="training images in all")
    parser.add_argument("--pool", default="resnet18,resnet18-half,cnn6")
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=2, help="that are measured in a run")
    parser.add_argument("--warm-up", type=int, default=1, help="rounds before those")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    ratios, seconds, services = [], [], []
    for run in range(arguments.runs):
        with tempfile.TemporaryDirectory() as folder:
            ratio, wall, share = measure(Path(folder, "run"), arguments)
        print(f"run {run + 1}: {wall:.1f} s a round, ratio {ratio:.3f}, services {100 * share:.1f} % of the CPU time")
        ratios.append(ratio)
        seconds.append(wall)
        services.append(share)
    print(f"round time over the learners' CPU seconds on {CORES} cores: {in_words(ratios, 3)}")
    figures = {"ratio": spread(ratios), "seconds_a_round": spread(seconds), "share_of_services": spread(services)}
    given = {"count": arguments.count, "pool": arguments.pool, "samples": arguments.samples}
    write(arguments.json, "round_time", {**given, "data": str(arguments.data or "digits"), **figures})


def measure(out: Path, arguments: argparse.Namespace) -> tuple[float, float, float]:
    """Ratio, seconds a round, and the services' share of the CPU time."""
    last = arguments.warm_up + arguments.rounds
    options = ["--dataset", f"npz:{arguments.data.resolve()}"] if arguments.data else []
    options += ["--count", str(arguments.count), "--rounds", str(last + 1), "--samples", str(arguments.samples)]
    with mesh(out, [*options, "--pool", arguments.pool]) as process:
        marks = []
        for number in (arguments.warm_up, last):
            while min(rounds(out, arguments.count)) < number:
                check(process, out)
                time.sleep(0.05)
            learners, services = (pids(out, arguments.count, role) for role in ("learner", "service"))
            marks.append((time.monotonic(), cpu_seconds(learners), cpu_seconds(services)))
    wall, computing, serving = (after - before for before, after in zip(*marks, strict=True))
    return wall * CORES / computing, wall / arguments.rounds, serving / (serving + computing)


if __name__ == "__main__":
    main()
