"""A child ends with its parent, and nothing runs between fork and exec."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processes import ENVIRONMENT

from launch.mesh import environment

ROOT = Path(__file__).parents[1]
linux = pytest.mark.skipif(sys.platform != "linux", reason="the system does not offer it")
CHILD = """
import os, sys
from crad_p2p.parent import end_with_named_parent
end_with_named_parent()
print(os.getpid(), "CRAD_PARENT" in os.environ, flush=True)
sys.stdin.read()
"""
#: Starts the child, shares its input and output with it, and waits to be killed.
PARENT = """
import signal, subprocess, sys
from launch.mesh import environment
subprocess.run([sys.executable, "-c", sys.argv[1]], env=environment(signal.SIGTERM))
"""


@linux
def test_a_child_ends_when_its_parent_is_killed() -> None:
    command = [sys.executable, "-c", PARENT, CHILD]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        _, named = parent.stdout.readline().split()
        parent.kill()
        assert parent.stdout.read() == ""  # ends when nobody holds the other end any more; its input is still open
    assert named == "False"  # its own children have another parent


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_child_ends_whose_parent_ended_before_it_could_ask(number: signal.Signals) -> None:
    entry = {"CRAD_PARENT": f"{os.getppid()} {number:d}"}  # stands for one that has ended: it is not the child's
    ended = subprocess.run([sys.executable, "-c", CHILD], env={**os.environ, **entry}, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (-number, "")


@pytest.mark.parametrize("package", ["peer", "launch"])
def test_the_commands_look_for_their_parent_first(package: str) -> None:
    command = [sys.executable, "-P", "-m", package, "--version"]
    for parent, expected in ((os.getpid(), 0), (os.getppid(), -signal.SIGKILL)):
        entry = {"CRAD_PARENT": f"{parent} {signal.SIGKILL:d}"}
        ended = subprocess.run(command, env={**ENVIRONMENT, **entry}, capture_output=True, timeout=60)
        assert ended.returncode == expected


def test_a_child_of_a_mesh_has_no_option_of_a_single_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CRAD_ID", "5")
    found = environment(signal.SIGTERM)
    assert {name for name in found if name.startswith("CRAD_")} == {"CRAD_PARENT"}
    assert found["CRAD_PARENT"] == f"{os.getpid()} {signal.SIGTERM:d}"


def test_nothing_runs_between_fork_and_exec() -> None:
    for package in ("crad_p2p", "peer", "launch"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                assert not (isinstance(node, ast.keyword) and node.arg == "preexec_fn"), path
