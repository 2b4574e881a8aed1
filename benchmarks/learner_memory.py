"""Peak memory of a learner among five and among forty peers, with the same shard and the same pool.

    python benchmarks/learner_memory.py
    python benchmarks/learner_memory.py --device cuda --counts 10 100       # that of the GPU

Three rounds each, in processes of their own: allocators take a few teachers of each architecture to settle.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from one_client import in_own_process
from report import in_words, spread, write


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", type=int, nargs=2, default=[5, 40])
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--pool", default="resnet18,resnet18-half,cnn6")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    peaks: dict[int, list[float]] = {count: [] for count in arguments.counts}
    which = "peak_device_bytes" if arguments.device == "cuda" else "peak_rss_bytes"
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(arguments.runs):
            for count, values in peaks.items():
                options = {"samples": arguments.samples, "pool": arguments.pool, "device": arguments.device}
                found = in_own_process(Path(folder), count=count, classes=10, rounds=3, **options)
                values.append(found[which] / 1e6)
                print(f"N = {count}: {values[-1]:.0f} MB", flush=True)
    few, many = peaks.values()
    ratios = [b / a for a, b in zip(few, many, strict=True)]
    print(f"peak memory at N = {arguments.counts[1]} over that at N = {arguments.counts[0]}: {in_words(ratios, 3)}")
    megabytes = {str(count): spread(values) for count, values in peaks.items()}
    given = {"device": arguments.device, "samples": arguments.samples, "pool": arguments.pool}
    write(arguments.json, "learner_memory", {**given, "peak_mb": megabytes, "ratio": spread(ratios)})


if __name__ == "__main__":
    main()
