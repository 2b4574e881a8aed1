"""The table of docs/performance.md, from the figures that the other benchmarks have written.

python benchmarks/table.py            # writes it into the page
python benchmarks/table.py --check    # ends with 1 if the page has another one
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "performance.md"
BEGIN, END = "<!-- {} from benchmarks/results by benchmarks/table.py -->\n", "<!-- end -->\n"


def figure(tree: dict[str, float], form: str = "{:.2f}") -> str:
    """Median, with least and greatest where they differ."""
    median, least, greatest = (form.format(tree[name]) for name in ("median", "least", "greatest"))
    return median if least == greatest else f"{median} ({least} to {greatest})"


def percent(tree: dict[str, float]) -> str:
    return figure({name: 100 * value for name, value in tree.items()}, "{:.0f}") + " %"


def of_teachers(precision: str) -> Callable[[dict[str, Any]], str]:
    def show(found: dict[str, Any]) -> str:
        each = found["precision"][precision]
        return (
            f"{figure(each['ratio'])} times; top-1 equal on {100 * each['targets_with_the_same_top1']:.2f} % of "
            f"{found['images']} images, mean absolute difference {each['mean_absolute_difference']:.1e}"
        )

    return show


def memory_of_service(found: dict[str, float]) -> str:
    return (
        f"{found['at rest, MB']:.0f} MB at rest, {found['peak, MB']:.0f} MB at most; with its share alone of what "
        f"processes have in common (PSS) {found['its share (Pss), MB']:.0f} MB at rest"
    )


#: What, goal, the file of its figures, how they are shown, and the command.
ROWS: tuple[tuple[str, str, str, Callable[[dict[str, Any]], str], str], ...] = (
    (
        "teacher pass in bfloat16 against the literal loop of Algorithm 1",
        "≥ 2.5 times faster; top-1 equal on ≥ 99.5 %, difference ≤ 2e-3",
        "teachers",
        of_teachers("bfloat16"),
        "teachers.py",
    ),
    (
        "the same in float32",
        "≥ 1.25 times; likewise",
        "teachers",
        of_teachers("float32"),
        "teachers.py",
    ),
    (
        "share of `torch.mm`'s speed that the teacher pass reaches",
        "≥ 90 %",
        "teachers",
        lambda found: ", ".join(
            f"{100 * each['share_of_mm_speed']:.0f} % in {name}" for name, each in found["precision"].items()
        ),
        "teachers.py",
    ),
    (
        "a learner's peak memory among 40 peers over that among 5",
        "within 5 %",
        "learner_memory",
        lambda found: figure(found["ratio"], "{:.3f}"),
        "learner_memory.py --runs 2",
    ),
    (
        "round time over the learners' CPU seconds divided by the cores",
        "≤ 1.10",
        "round_time",
        lambda found: (
            f"{figure(found['ratio'])}, with {found['samples']} images in all and "
            f"{found['seconds']['median']:.0f} s a round"
        ),
        "round_time.py --data cifar10.npz --rounds 2",
    ),
    (
        "one peer three times slower: part of the others' teacher pass done before its snapshot arrives",
        "≥ 80 %",
        "waiting",
        lambda found: f"{percent(found['part_done'])}; of what there was time for {percent(found['part_used'])}",
        "waiting.py --data cifar10.npz",
    ),
    (
        "moving snapshots over mutual TLS: CPU seconds a GB, both ends, against raw TLS sockets of Python",
        "≤ 1.7",
        "tls",
        lambda found: (
            f"{figure(found['ratio']['peers, bytes only to sockets'])}; with writing and hashing, against sockets "
            f"that do that too, {figure(found['ratio']['peers to sockets with files'])}"
        ),
        "tls.py",
    ),
    (
        "service process, ten peers with snapshots of 45 MB: resident memory",
        "≤ 70 MB",
        "service_10",
        memory_of_service,
        "service_memory.py",
    ),
    (
        "service process, 100 peers with tiny models: resident memory",
        "≤ 120 MB",
        "service_100",
        memory_of_service,
        "service_memory.py --peers 100 --megabytes 0",
    ),
    (
        "`crad-mesh up` with ten peers, to the first training step",
        "≤ 12 s",
        "start",
        lambda found: f"{figure(found['first'], '{:.1f}')} s",
        "start.py",
    ),
    (
        "100 peers, ten active a round, 20 rounds of a tiny model, real services",
        "completes",
        "pool",
        lambda found: (
            f"exit code {found['exit_code']} after {found['seconds']:.0f} s, models "
            + ("equal to" if found["same_as_simulate"] else "NOT equal to")
            + f" those of `simulate`; a service has {found['service']['resident_mb']:.0f} MB and "
            f"{found['service']['threads']} threads, a learner {found['learner']['proportional_mb']:.0f} MB (PSS) and "
            f"{found['learner']['threads']} threads"
        ),
        "pool.py",
    ),
)


def goals() -> str:
    lines = ["| what | goal | measured | by |", "|---|---|---|---|"]
    for what, goal, name, show, command in ROWS:
        lines.append(f"| {what} | {goal} | {show(read(name))} | `{command}` |")
    return "\n".join(lines) + "\n"


def frameworks() -> str:
    found = read("frameworks")
    lines = [
        "| | seconds a round | CPU seconds a round | of them beside training | seconds in all | memory | models sent |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, each in found["candidates"].items():
        named = ("wall_seconds_per_round", "cpu_seconds_per_round", "cpu_seconds_per_round_beside_training")
        cells = [figure(each[column], "{:.1f}") for column in (*named, "wall_seconds")]
        sizes = (each["peak_pss_bytes"]["median"], each["model_bytes_per_round"])
        cells += [f"{size / 1e6:.0f} MB" for size in sizes]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    training = found["training_cpu_seconds_per_round"]["median"] + found["validation_cpu_seconds_per_round"]["median"]
    versions = (
        f"{name} with {', '.join(f'{k} {v}' for k, v in each['versions'].items())}"
        for name, each in found["candidates"].items()
    )
    lines += [
        "",
        f"{found['peers']} clients with {found['training_images']} training images in all, {found['arch']}, "
        f"{found['rounds']} rounds, of which the first and the last do not count; training and validating alone take "
        f"{training:.1f} CPU seconds a round. Versions: {'; '.join(versions)}.",
    ]
    return "\n".join(lines) + "\n"


def read(name: str) -> Any:
    return json.loads((HERE / "results" / f"{name}.json").read_text())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    page = PAGE.read_text()
    new = page
    for name, make in (("goals", goals), ("frameworks", frameworks)):
        before, begin, rest = new.partition(BEGIN.format(name))
        _, end, after = rest.partition(END)
        if not begin or not end:
            sys.exit(f"{PAGE}: no place for the table of {name}")
        new = before + begin + make() + end + after
    if arguments.check:
        return int(new != page)
    PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
