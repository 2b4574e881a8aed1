"""A child ends with its parent, and nothing runs between fork and exec."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import ENVIRONMENT, Peers, has_ended, until, up_command

from crad_p2p.errors import ExitCode
from launch.children import environment

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
from launch.children import environment
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


@pytest.mark.parametrize("entry", ["", "abc", "1", "1 99", "1 x", "-1 9", "9" * 5000])
def test_an_entry_of_another_form_says_nothing(entry: str) -> None:
    env = {**os.environ, "CRAD_PARENT": entry}
    ended = subprocess.run([sys.executable, "-c", CHILD], env=env, input="", capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.endswith("False\n")


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


# --- the simulations that up and chaos start --------------------------------------------------------------------------


def simulation_in(folder: Path) -> int:
    """The process id of a simulation that writes to this folder, 0 if there is none."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_text().split("\0")
        except OSError:
            continue
        if "simulate" in words and str(folder) in words:
            return int(path.parent.name)
    return 0


def end_during_the_simulation(process: subprocess.Popen[str], folder: Path, number: signal.Signals) -> str:
    """Only the parent gets the signal; what it said last."""
    simulation = 0
    try:
        until(lambda: simulation_in(folder), "the simulation is there", 60)
        simulation = simulation_in(folder)
        if number == signal.SIGKILL:  # stopped, it cannot end because it finds nobody to write to
            until(lambda: "libtorch" in Path(f"/proc/{simulation}/maps").read_text(), "it is past its start", 60)
            os.kill(simulation, signal.SIGSTOP)
        process.send_signal(number)
        said, _ = process.communicate(timeout=10)
        if number != signal.SIGKILL:
            assert process.returncode == ExitCode.INCOMPLETE
        until(lambda: has_ended(simulation, folder), "the simulation ends too", 10)  # of itself, if it just began
    finally:
        process.kill()
        if simulation and not has_ended(simulation, folder):
            os.kill(simulation, signal.SIGKILL)
    return said.splitlines()[-1]


@linux
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_undisturbed_run_ends_with_chaos(tmp_path: Path, number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "launch", "chaos", "--count", "2", "--rounds", "5000", "--out", "out"],
        cwd=tmp_path,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    said = end_during_the_simulation(process, tmp_path / "out/undisturbed", number)
    if number != signal.SIGKILL:
        assert said == (
            "crad-mesh: interrupted; choose another --out for the next run; what there is of this one is in "
            f"{tmp_path / 'out'}"
        )


@linux
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_comparison_ends_with_up(mesh: Callable[..., Peers], number: signal.Signals) -> None:
    peers = mesh(2, rounds=2)
    process = subprocess.Popen(
        **up_command(peers, "--alone"), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    said = end_during_the_simulation(process, peers.folder / "out/alone", number)
    if number != signal.SIGKILL:
        assert said.startswith("crad-mesh: interrupted; the same command runs the comparison again")
