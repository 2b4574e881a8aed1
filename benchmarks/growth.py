"""How the cost of a round grows with the number of peers, the size of the shard and the number of classes.

    python benchmarks/growth.py --json growth.json --plot docs/growth.svg      # some minutes; needs matplotlib

CPU seconds of one client's round by phase, and the peak memory of its process, each in a process of its own. From the
least value on, the time of each phase should be proportional to shard size, that of the teachers to N - 1, and memory
should not depend on N.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from one_client import in_own_process
from report import spread, write

BASE = {"count": 10, "samples": 128, "classes": 10}
VARIED = {
    "count": ("peers N", (5, 10, 20, 40)),
    "samples": ("training images of the shard", (64, 128, 256, 512)),
    "classes": ("classes C", (10, 100, 1000)),
}
PHASES = ("teachers", "train", "validate")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pool", default="resnet18,resnet18-half,cnn6")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="an SVG or PNG file")
    arguments = parser.parse_args()
    figures: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (title, values) in VARIED.items():
            figures[name] = []
            print(f"{title:>30}   teachers   train   validate  (CPU seconds a round)   peak memory")
            for value in values:
                options = {**BASE, name: value, "pool": arguments.pool, "rounds": arguments.rounds}
                runs = [in_own_process(Path(folder), **options) for _ in range(arguments.runs)]
                seconds = {phase: spread([run["cpu_seconds"][phase] for run in runs]) for phase in PHASES}
                memory = spread([run["peak_rss_bytes"] / 1e6 for run in runs])
                figures[name].append({"value": value, "cpu_seconds": seconds, "peak_mb": memory})
                shown = "".join(f"{seconds[phase]['least']:10.2f}" for phase in PHASES)
                print(f"{value:30} {shown}{memory['median']:36.0f} MB", flush=True)
    write(arguments.json, "growth", {"base": BASE, "pool": arguments.pool, "varied": figures})
    if arguments.plot:
        plot(figures, arguments.plot)


def plot(figures: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """One panel a varied number: stacked phases on the left axis, memory on the right one."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "growth"  # the same figures give the same file
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(figures), figsize=(11, 3.4), layout="constrained")
    for panel, (name, points) in zip(panels, figures.items(), strict=True):
        values = [str(point["value"]) for point in points]
        bottom = [0.0] * len(points)
        for phase, colour in zip(PHASES, ("#3b6ea8", "#e0a030", "#7a7a7a"), strict=True):
            heights = [point["cpu_seconds"][phase]["least"] for point in points]
            panel.bar(values, heights, bottom=bottom, color=colour, label=phase, width=0.6)
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
        panel.set_xlabel(VARIED[name][0])
        panel.set_ylabel("CPU seconds a round")
        memory = panel.twinx()
        memory.plot(values, [point["peak_mb"]["median"] / 1e3 for point in points], "ko--", markersize=4, linewidth=1)
        memory.set_ylim(0, 1.3 * max(point["peak_mb"]["median"] for point in points) / 1e3)
        panel.set_ylim(0, 1.15 * max(bottom))
        memory.set_ylabel("peak memory (GB, dashed)")
        memory.spines["top"].set_visible(False)
        panel.spines["top"].set_visible(False)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=len(PHASES), frameon=False)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    print(f"Drawn to {path}")


if __name__ == "__main__":
    main()
