"""benchmarks/process_tree.py: nobody who was started is forgotten, whoever has ended meanwhile."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

#: A process whose child works for 0.3 CPU seconds, says so, and outlives it in a session of its own.
_PARENT = """
import subprocess, sys
child = '''import sys, time
sys.stdin.readline()
while time.process_time() < 0.3: pass
print(flush=True)
sys.stdin.read()'''
subprocess.Popen([sys.executable, "-c", child], start_new_session=True)
print(flush=True)
sys.stdin.readline()
"""


def test_a_child_that_outlives_its_parent_counts_and_is_ended() -> None:
    from process_tree import ProcessTree

    # The child inherits both pipes, and is told to work when its parent is gone.
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", _PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdout.readline()
    tree = ProcessTree(process.pid)
    tree.sample()
    process.kill()
    process.wait()
    process.stdin.write(b"\n")
    process.stdout.readline()
    tree.sample()
    assert tree.series[-1][1] >= 0.3
    tree.sample_memory()
    assert tree.peak_pss_bytes > 1_000_000
    assert tree.end(0.0) == 1
    assert process.stdout.read() == b""  # it holds the pipe no more
    assert tree.end(5.0) == 0  # as soon as the system has put it away


def test_cpu_time_between_two_samples_is_taken_by_proportion() -> None:
    from process_tree import ProcessTree

    tree = ProcessTree(0)
    tree.series = [(10.0, 1.0), (12.0, 2.0), (13.0, 6.0)]
    assert [tree.cpu_at(moment) for moment in (11.0, 12.0, 12.5, 20.0)] == [1.5, 2.0, 4.0, 6.0]
