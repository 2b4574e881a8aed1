"""The rounds of a real mesh against the computing in them: what do barrier, transfer and disk cost?

    python benchmarks/round_time.py                                   # ten peers on digits
    python benchmarks/round_time.py --data ../data/cifar10.npz                # some minutes a round

One run of ``crad-mesh up``. For every round, from the moment at which all peers have committed the one before to that
at which all have committed it, are taken the wall time and the CPU seconds of all learners. The ratio is the wall time
over those CPU seconds divided by the cores: 1.0 would be a mesh whose services cost nothing and which never leaves a
core idle. What services do does not depend on the number of images, so the more there are the closer it comes to that.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from meshes import CORES, add_options, check, cpu_seconds, described, mesh, options_of, pids, rounds
from report import in_words, spread, write


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, samples=8000)
    parser.add_argument("--rounds", type=int, default=3, help="that are measured")
    parser.add_argument("--warm-up", type=int, default=1, help="rounds before those")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder, "run"), arguments)
    print(f"round time over the learners' CPU seconds on {CORES} cores: {in_words(found['ratio'], 3)}")
    figures = {name: spread(values) for name, values in found.items()}
    write(arguments.json, "round_time", {**described(arguments), **figures})


def measure(out: Path, arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Of every measured round: the ratio, its seconds, and the services' share of the CPU time."""
    last = arguments.warm_up + arguments.rounds
    found: dict[str, list[float]] = {"ratio": [], "seconds": [], "share_of_services": []}
    with mesh(out, options_of(arguments, last + 1)) as process:
        before = None
        for number in range(arguments.warm_up, last + 1):
            while min(rounds(out, arguments.count)) < number:
                check(process, out)
                time.sleep(0.05)
            learners, services = (cpu_seconds(pids(out, arguments.count, role)) for role in ("learner", "service"))
            now = (time.monotonic(), learners, services)
            if before is not None:
                wall, computing, serving = (b - a for a, b in zip(before, now, strict=True))
                found["ratio"].append(wall * CORES / computing)
                found["seconds"].append(wall)
                found["share_of_services"].append(serving / (serving + computing))
                print(
                    f"round {number}: {wall:.1f} s, ratio {found['ratio'][-1]:.3f}, services "
                    f"{100 * found['share_of_services'][-1]:.1f} % of the CPU time",
                    flush=True,
                )
            before = now
    return found


if __name__ == "__main__":
    main()
