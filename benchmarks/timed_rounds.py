"""As many rounds of several methods as fit in some time, each as a real mesh, all at once.

    python benchmarks/timed_rounds.py --data cifar10.npz --device cuda --seconds 300 --out OUT

In the setting of the paper: ten peers, Dirichlet alpha = 0.3, one local epoch a round, at most 300 rounds. Started
again with the same --out, the meshes continue. Printed are the rounds that every peer has finished, the seconds of a
round, and the mean accuracy on the common test set where it was evaluated last. Ends with 1 if some method has not made
two rounds, of which no time of a round could be told.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from meshes import add_options, check, described, mesh, options_of, rounds
from report import write


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, samples=50_000)
    parser.add_argument("--methods", nargs="+", default=["crad", "uniform"])
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    options = [*options_of(arguments, arguments.rounds), "--device", arguments.device]
    end = time.monotonic() + arguments.seconds
    with contextlib.ExitStack() as stack:
        running = {
            method: stack.enter_context(mesh(arguments.out / method, [*options, "--method", method]))
            for method in arguments.methods
        }
        while time.monotonic() < end and any(process.poll() is None for process in running.values()):
            for method, process in running.items():
                check(process, arguments.out / method)
            time.sleep(0.5)
    figures, too_few = {}, []
    for method in arguments.methods:
        figures[method] = found = read(arguments.out / method, arguments.count)
        if found["seconds_a_round"] is None:
            too_few.append(method)
            continue
        accuracy, number = found["mean_global_accuracy"], found["evaluated_round"]
        known = f"{100 * accuracy:.1f} % after round {number}" if accuracy is not None else "not evaluated yet"
        print(f"{method}: {found['rounds']} rounds, {found['seconds_a_round']} s a round, mean global accuracy {known}")
    write(arguments.json, "timed_rounds", {**described(arguments), "methods": figures})
    if too_few:
        sys.exit(f"{arguments.seconds:g} s were not enough for two rounds of {', '.join(too_few)}; give more --seconds")


def read(out: Path, count: int) -> dict[str, Any]:
    """What the peers have written."""
    lines = []
    for peer in range(count):
        with contextlib.suppress(FileNotFoundError):  # before the first round
            history = (out / "peers" / str(peer) / "history.jsonl").read_text()
            lines += [json.loads(line) for line in history.splitlines()]
    done = max(0, min(rounds(out, count)))
    seconds = [sum(line["seconds"].values()) for line in lines if 1 < line["round"] <= done]
    accuracies: dict[int, list[float]] = {}
    for line in lines:
        if line["round"] <= done and line["global_accuracy"] is not None:
            accuracies.setdefault(line["round"], []).append(line["global_accuracy"])
    last = max((number for number, values in accuracies.items() if len(values) == count), default=None)
    return {
        "rounds": done,
        "seconds_a_round": round(statistics.mean(seconds), 2) if seconds else None,
        "evaluated_round": last,
        "mean_global_accuracy": statistics.mean(accuracies[last]) if last is not None else None,
    }


if __name__ == "__main__":
    main()
