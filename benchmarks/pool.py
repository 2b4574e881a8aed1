"""A hundred peers on one machine, ten of them active a round: does it complete, and what does it hold?

    python benchmarks/pool.py                          # 100 peers, 20 rounds of a tiny model; some minutes
    python benchmarks/pool.py --count 20 --active 5 --rounds 5

One run of ``crad-mesh up --participation``: real services over mutual TLS, real learners. Printed are the exit code,
the time, and of services and learners the memory and the threads; then the digests are compared with those of
``crad-mesh simulate``. Ends with 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from meshes import memory_mb, mesh, pids, proportional_mb, status_of
from report import write

POOL = "cnn6@0.125"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--active", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    options = ["--count", str(arguments.count), "--participation", str(arguments.active)]
    # Evenly cut: with more skew a hundred shards of the digits are too small.
    options += ["--rounds", str(arguments.rounds), "--pool", POOL, "--alpha", "10"]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "run")
        found = run(out, options, arguments.count)
        peers_file = out / "peers.yaml"
        if found["exit_code"] == 0:
            found["same_as_simulate"] = digests(out) == simulated(Path(folder, "simulated"), peers_file)
    print(json.dumps(found, indent=1))
    write(arguments.json, "pool", {"count": arguments.count, "active": arguments.active, **found})
    return 0 if found["exit_code"] == 0 and found["same_as_simulate"] else 1


def run(out: Path, options: list[str], count: int) -> dict[str, Any]:
    """The mesh to its end; memory and threads are of the last look at all of its processes."""
    found: dict[str, Any] = {}
    start = time.monotonic()
    with mesh(out, options) as process:
        while process.poll() is None:
            with contextlib.suppress(OSError, ValueError, AssertionError):  # not all have started, or some have ended
                found.update(look(out, count))
            time.sleep(2.0)
    found = {"exit_code": process.returncode, "seconds": round(time.monotonic() - start, 1), **found}
    if process.returncode:
        print((out / "output.txt").read_text(errors="replace"), file=sys.stderr)
    return found


def look(out: Path, count: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for role in ("service", "learner"):
        processes = pids(out, count, role)
        resident = [memory_mb(pid) for pid in processes]
        threads = [status_of(pid, "Threads") for pid in processes]
        found[role] = {
            "resident_mb": round(statistics.median(resident), 1),
            "greatest_mb": round(max(resident), 1),
            "proportional_mb": round(statistics.median(map(proportional_mb, processes)), 1),
            "threads": int(statistics.median(threads)),
            "most_threads": int(max(threads)),
        }
    return found


def digests(out: Path) -> list[str]:
    summary = json.loads((out / "summary.json").read_text())
    return [peer["snapshot_sha256"] for peer in summary["peers"]]


def simulated(out: Path, peers_file: Path) -> list[str]:
    command = [sys.executable, "-P", "-m", "launch", "simulate", "--peers", str(peers_file), "--threads", "1"]
    subprocess.run([*command, "--out", str(out)], check=True, stdout=subprocess.DEVNULL)
    return digests(out)


if __name__ == "__main__":
    sys.exit(main())
