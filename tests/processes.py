"""Real ``crad-peer`` processes, for tests that start some."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from crad_p2p.results import RoundRecord

COMMAND = str(Path(sys.executable).with_name("crad-peer"))
#: Without settings of the command, and without what would make it print colours.
ENVIRONMENT = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith("CRAD_") and name not in ("FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS")
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def federation_file(folder: Path, *, peers: list[dict[str, Any]] | None = None, **changes: Any) -> Path:
    """One peer with the smallest model on a hundred digits, unless changed."""
    alone = [{"id": 0, "address": f"127.0.0.1:{free_port()}", "arch": "cnn6@0.125"}]
    tree = {"federation": "one", "rounds": 2, "data": {"dataset": "digits", "samples": 100}, **changes}
    path = folder / "peers.yaml"
    path.write_text(yaml.safe_dump({**tree, "peers": peers or alone}))
    return path


def until(test: Callable[[], Any], what: str, seconds: float = 120.0) -> None:
    """A bounded poll."""
    deadline = time.monotonic() + seconds
    while not test():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.01)


class Peer:
    """A running ``crad-peer`` with its state directory."""

    def __init__(self, folder: Path, *options: str, state: Path, **environment: str) -> None:
        self.state = state
        self._log = (folder / f"{time.monotonic_ns()}.log").open("w+")
        self.process = subprocess.Popen(
            [COMMAND, *options],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**ENVIRONMENT, **environment},
        )

    @property
    def output(self) -> str:
        return Path(self._log.name).read_text()

    def learner(self) -> int:
        """Process id of the learner of now, 0 if there is none yet."""
        path = self.state / "learner.pid"
        return int(path.read_text() or 0) if path.exists() else 0

    def last_round(self) -> int:
        rounds = [int(path.name) for path in self.state.glob("rounds/[0-9]*")]
        return max(rounds, default=-1)

    def history(self) -> list[RoundRecord]:
        lines = (self.state / "history.jsonl").read_text().splitlines()
        return [RoundRecord.from_line(line) for line in lines]

    def reach(self, number: int) -> None:
        def reached() -> bool:
            assert self.process.poll() is None, self.output
            return self.last_round() >= number

        until(reached, f"round {number} of {self.state}")

    def ended(self, seconds: float = 120.0) -> int:
        return self.process.wait(seconds)

    def end(self) -> None:
        """End the service, and the learner should it be left."""
        learner = self.learner()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._log.close()
        if learner and not has_ended(learner, self.state):
            try:
                until(lambda: has_ended(learner, self.state), "the learner is left behind", 10)
            finally:
                if not has_ended(learner, self.state):
                    os.kill(learner, signal.SIGKILL)


def has_ended(pid: int, state: Path) -> bool:
    """Whether the learner of this state directory has ended; ids are reused, and a zombie has no command line."""
    try:
        return str(state) not in Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return True
