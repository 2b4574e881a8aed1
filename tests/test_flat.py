"""Nothing grows with the rounds: the short form of benchmarks/flat.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "flat.py"


def test_neither_memory_nor_files_nor_threads_nor_disk_grow_with_the_rounds() -> None:
    ended = subprocess.run(
        [sys.executable, str(BENCHMARK), "--count", "3", "--rounds", "90"], capture_output=True, text=True, timeout=200
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "nothing grows that should not" in ended.stdout
