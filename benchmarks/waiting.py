"""Is the time used in which a peer waits for a slow one? One peer of a real mesh is made three times slower.

    python benchmarks/waiting.py
    python benchmarks/waiting.py --data ../data/cifar10.npz --slow 0

Its learner is stopped two thirds of every tenth of a second. From the events that the other peers record is taken how
much of the time of each teacher pass lay before the last snapshot arrived; that is what need not be done after it. Only
passes of peers that waited count: those that had published before that snapshot came. The most that is possible is the
part of the others in the pass, for the slow peer's own snapshot comes last; and a peer that published shortly before it
had no more time than that. So the second figure is what was done, of what could have been done in that time.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import tempfile
import threading
import time
from pathlib import Path

from meshes import add_options, check, described, mesh, options_of, pids, rounds
from report import in_words, spread, write

PERIOD = 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, samples=1400)
    parser.add_argument("--rounds", type=int, default=4, help="that are measured")
    parser.add_argument("--slow", type=int, default=1, help="id of the slow peer")
    parser.add_argument("--times", type=float, default=3.0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "run")
        run(out, arguments)
        others = [peer for peer in range(arguments.count) if peer != arguments.slow]
        passes = [each for peer in others for each in parts(out / "peers" / str(peer), arguments)]
    done = [done for done, _ in passes]
    used = [used for _, used in passes]
    print(f"of the {len(passes)} teacher passes of {len(others)} peers that waited, before the last snapshot came:")
    print(f"{in_words(done)}; of what there was time for: {in_words(used)}")
    given = {**described(arguments), "slow": arguments.slow}
    write(arguments.json, "waiting", {**given, "part_done": spread(done), "part_used": spread(used)})


def run(out: Path, arguments: argparse.Namespace) -> None:
    """As many rounds as are needed, with the slow peer slow."""
    last = arguments.rounds + 1
    ended = threading.Event()
    with mesh(out, options_of(arguments, last)) as process:
        while min(rounds(out, arguments.count)) < 0:
            check(process, out)
            time.sleep(0.05)
        learner = pids(out, arguments.count, "learner")[arguments.slow]
        thread = threading.Thread(target=slow_down, args=(learner, arguments.times, ended))
        thread.start()
        try:
            while min(rounds(out, arguments.count)) < last:
                check(process, out)
                time.sleep(0.05)
        finally:
            ended.set()
            thread.join()


def slow_down(pid: int, times: float, ended: threading.Event) -> None:
    """Let a process run for one part in so many of the time."""
    while not ended.is_set():
        os.kill(pid, signal.SIGSTOP)
        ended.wait(PERIOD * (1 - 1 / times))
        os.kill(pid, signal.SIGCONT)
        ended.wait(PERIOD / times)


def parts(state: Path, arguments: argparse.Namespace) -> list[tuple[float, float]]:
    """Of every round for which it waited: what part of the teacher pass lay before the last snapshot; and what part of
    that which could, in the time since it had published and without the last teacher's own.
    """
    published: dict[int, float] = {}
    held: dict[tuple[int, int], float] = {}  # by peer and round
    begun: dict[tuple[int, int], float] = {}
    ran: dict[tuple[int, int], tuple[float, float]] = {}
    for path in (state / "events.previous.jsonl", state / "events.jsonl"):
        for line in path.read_text().splitlines() if path.exists() else ():
            entry = json.loads(line)
            if "event" not in entry:
                continue
            event, now = entry["event"], entry["now"]
            key = (event.get("peer"), event.get("round"))
            if event["is"] == "SnapshotHeld":
                held.setdefault(key, now)
            elif event["is"] == "Published":
                published[event["round"]] = now
            elif event["is"] == "Taught":
                ran[key] = (begun[key], now)
            for decision in entry["decisions"]:
                if decision["is"] == "Teach":
                    begun[decision["peer"], decision["round"]] = now
    found = []
    for number in range(1, arguments.rounds + 1):
        spans = {peer: span for (peer, of), span in ran.items() if of == number}
        last = max(when for (_, of), when in held.items() if of == number)
        if published[number] >= last:
            continue
        final = max(spans, key=lambda peer: held[peer, number])
        total = sum(end - start for start, end in spans.values())
        before = sum(max(0.0, min(end, last) - start) for start, end in spans.values())
        could = min(total - (spans[final][1] - spans[final][0]), last - published[number])
        # A pass may have begun before its peer published: then more was done than the time since then allows.
        found.append((before / total, min(1.0, before / could)))
    return found


if __name__ == "__main__":
    main()
