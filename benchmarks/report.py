"""What a benchmark writes: its figures with their spread, and the machine they are of."""

from __future__ import annotations

import json
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch


def machine() -> dict[str, Any]:
    """Processor, cores that this process may use, and versions."""
    model = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"processor": model, "cores": cores, "python": platform.python_version(), "torch": torch.__version__}


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and greatest of several runs."""
    return {"median": statistics.median(values), "least": min(values), "greatest": max(values), "runs": len(values)}


def in_words(values: Sequence[float], digits: int = 2) -> str:
    """For people."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def write(path: Path | None, name: str, figures: Mapping[str, Any]) -> None:
    """As JSON, if a file was asked for."""
    if path is not None:
        command = shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *_without_file(sys.argv[1:])])
        found = {"benchmark": name, "command": command, "machine": machine(), **figures}
        path.write_text(json.dumps(found, indent=1) + "\n")
        print(f"Written to {path}")


def _without_file(options: Sequence[str]) -> list[str]:
    """What was asked for, but for where it is written, and with the names of files alone."""
    kept = []
    words = iter(options)
    for word in words:
        if word == "--json":
            next(words, None)
        elif not word.startswith("--json="):
            kept.append(Path(word).name if os.sep in word else word)
    return kept
