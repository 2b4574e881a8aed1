"""Real ``crad-peer`` processes: started, watched, and always ended."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import yaml

from crad_p2p import forking
from crad_p2p.errors import ExitCode
from crad_p2p.manifest import Manifest
from crad_p2p.parent import parent_entry
from crad_p2p.results import PeerResult, RoundRecord
from launch.authority import throwaway
from launch.quick import free_ports
from peer.events import Connected
from peer.recorder import FILE, replay
from peer.store import Store

COMMAND = str(Path(sys.executable).with_name("crad-peer"))
#: Without settings of the command, and without what would make it print colours.
ENVIRONMENT = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith("CRAD_") and name not in ("FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS")
}
#: A folder that makes learners light (see there).
LIGHT = Path(__file__).with_name("light")


#: ``crad-peer`` that goes on whatever the others have had of it.
DEAF = (
    sys.executable,
    "-P",
    "-c",
    "import peer.exchange, peer.cli; peer.exchange.refuse_rollback = lambda *_: None; peer.cli.main()",
)


def doctored(code: str) -> tuple[str, ...]:
    """A command: Python that runs this code."""
    return (sys.executable, "-P", "-c", code)


def free_port() -> int:
    return free_ports(1)[0]


def federation_file(
    folder: Path, *, peers: list[dict[str, Any]] | None = None, home: Path | None = None, **changes: Any
) -> Path:
    """One peer with the smallest model on a hundred digits, unless changed; ``home`` is where peers are started."""
    alone = [{"id": 0, "address": f"127.0.0.1:{free_port()}", "arch": "cnn6@0.125"}]
    tree = {"federation": "one", "rounds": 2, "data": {"dataset": "digits", "samples": 100}, **changes}
    path = folder / "peers.yaml"
    path.write_text(yaml.safe_dump({**tree, "peers": peers or alone}))
    certificates(home or folder, str(tree["federation"]), [entry["id"] for entry in peers or alone])
    return path


def certificates(folder: Path, federation: str, ids: Iterable[int]) -> None:
    """Certificates where ``crad-peer`` looks for them when it is started in this folder."""
    throwaway(folder / "crad-tls", federation, ids)


def until(test: Callable[[], Any], what: str, seconds: float = 120.0) -> None:
    """A bounded poll."""
    deadline = time.monotonic() + seconds
    while not test():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.01)


class ForkServer:
    """One for all real learners of a test session that may share it, started when it is first needed."""

    def __init__(self) -> None:
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def entries(self) -> dict[str, str]:
        """For the environment of a peer whose learner it is to fork; empty where the system does not offer that."""
        if not forking.is_supported():
            return {}
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory()
            with forking.listen(self._path) as listener:
                self._process = subprocess.Popen(
                    forking.command(listener, "crad_p2p.learner"),
                    stdin=subprocess.DEVNULL,
                    pass_fds=[listener.fileno()],
                    start_new_session=True,
                    env={**ENVIRONMENT, **parent_entry(signal.SIGKILL)},
                )
        return {forking.NAME: str(self._path)}

    @property
    def _path(self) -> Path:
        assert self._folder is not None
        return Path(self._folder.name, "socket")

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._folder is not None:
            self._folder.cleanup()


FORK_SERVER = ForkServer()


class Peer:
    """A running ``crad-peer`` with its state directory."""

    def __init__(
        self, folder: Path, *options: str, state: Path, command: tuple[str, ...] = (COMMAND,), **environment: str
    ) -> None:
        self.state = state
        self._log = (folder / f"{time.monotonic_ns()}.log").open("w+")
        self.process = subprocess.Popen(
            [*command, *options],
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
        path = self.state / "history.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []  # there is none before the first round
        return [RoundRecord.from_line(line) for line in lines]

    def manifest(self, number: int) -> Manifest:
        return Manifest.from_bytes((self.state / f"rounds/{number:06d}/manifest.json").read_bytes())

    def result(self) -> PeerResult:
        result = Store(self.state).result()
        assert result is not None
        return result

    def reach(self, number: int) -> None:
        def reached() -> bool:
            assert self.process.poll() is None or self.last_round() >= number, self.output
            return self.last_round() >= number

        until(reached, f"round {number} of {self.state}: {self.output}")

    def says(self, text: str, seconds: float = 60.0) -> None:
        """Wait until the log holds this regular expression."""

        def said() -> bool:
            found = re.search(text, self.output)
            assert found or self.process.poll() is None, f"ended without '{text}': {self.output}"
            return bool(found)

        until(said, f"'{text}' in the log of {self.state}", seconds)

    def has(self, other: int, number: int) -> bool:
        """Whether another peer's snapshot is here."""
        return (self.state / f"received/{number:06d}/{other}.safetensors").exists()

    def times_connected(self, other: int) -> int:
        """How often it has reached another peer."""
        path = self.state / FILE
        return sum(step.event == Connected(other) for step in replay(path)) if path.exists() else 0

    def explanation(self) -> str:
        """What it waits for, after the last event that it has taken in."""
        path = self.state / FILE
        said = [step.explanation for step in replay(path)] if path.exists() else []
        return said[-1] if said else ""

    def last_words(self) -> str:
        return self.output.splitlines()[-1]

    def ended(self, seconds: float = 120.0) -> int:
        return self.process.wait(seconds)

    def kill(self) -> None:
        """As a power cut does to the service; its learner ends by itself then."""
        self.process.kill()
        self.process.wait()

    def stop(self, number: signal.Signals = signal.SIGTERM) -> float:
        """Ask it to end; the seconds that it took."""
        start = time.monotonic()
        self.process.send_signal(number)
        self.process.wait(60)
        return time.monotonic() - start

    def end(self) -> None:
        """End the service, and the learner should it be left."""
        learner = self.learner()
        if self.process.poll() is None:
            self.kill()
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


class Peers:
    """A federation of ``crad-peer`` processes with light learners, or real ones; peer i keeps its state in ``state-i``.

    Args:
        settings: fields of the federation file.
    """

    def __init__(self, folder: Path, count: int, *, light: bool = True, linger: float = 20.0, **settings: Any) -> None:
        self.folder = folder
        self.count = count
        self.light = light
        self.linger = linger
        self.settings = {"data": {"dataset": "digits", "samples": 100 * count}, **settings}
        self.ports = free_ports(count)
        self.control = folder / "control"
        self.control.mkdir()
        self.file = self.write_file(folder)
        self._started: list[Peer] = []

    def write_file(self, folder: Path, ports: dict[int, int] | None = None) -> Path:
        """The federation file; ``ports`` says where some of the peers are to be found instead."""
        folder.mkdir(exist_ok=True)
        where = {**dict(enumerate(self.ports)), **(ports or {})}
        peers = [{"id": i, "address": f"127.0.0.1:{port}", "arch": "cnn6@0.125"} for i, port in where.items()]
        return federation_file(folder, peers=peers, **self.settings)

    def state(self, peer: int | str) -> Path:
        return self.folder / f"state-{peer}"

    def tell(self, name: str, value: object, peer: int | None = None) -> None:
        """Tell the light learners of all peers, or one, something; None takes it back."""
        path = self.control / (name if peer is None else f"{name}-{peer}")
        if value is None:
            path.unlink(missing_ok=True)
        else:
            partial = path.with_suffix(".partial")  # a learner must not read half of it
            partial.write_text(str(value))
            partial.rename(path)

    def start(
        self,
        peer: int,
        *options: str,
        state: Path | None = None,
        file: Path | None = None,
        command: tuple[str, ...] = (COMMAND,),
        **environment: str,
    ) -> Peer:
        state = state or self.state(peer)
        if not self.light and self.count > 1:
            environment = {**FORK_SERVER.entries(), **environment}
        if self.light:
            paths = [str(LIGHT), environment.pop("PYTHONPATH", ENVIRONMENT.get("PYTHONPATH", ""))]
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
            environment.setdefault("LIGHT_CONTROL", str(self.control))
        common = ["--id", str(peer), "--peers", str(file or self.file), "--state-dir", str(state)]
        common += ["--device", "cpu", "--threads", "1", "--linger", str(self.linger)]
        self._started.append(Peer(self.folder, *common, *options, state=state, command=command, **environment))
        return self._started[-1]

    def start_all(self, *options: str) -> list[Peer]:
        return [self.start(i, *options) for i in range(self.count)]

    def connected(self, started: list[Peer]) -> None:
        """Wait until all have reached one another, so that nothing depends on how fast each of them starts."""
        for i, each in enumerate(started):
            for j in range(len(started)):
                until(lambda each=each, j=j, i=i: i == j or each.times_connected(j), f"{each.state} reaches peer {j}")

    def run_to(self, number: int, *options: str) -> list[Peer]:
        """Start all; they have published this round, and have that of the others, and wait."""
        self.tell("hold", 1)
        started = self.start_all(*options)
        self.connected(started)
        self.go_to(number, started)
        return started

    def go_to(self, number: int, peers: list[Peer]) -> None:
        """Let these, which are all that run, go on up to this round."""
        self.tell("hold", number + 1)
        for each in peers:
            each.reach(number)
        ids = [int(each.state.name.rpartition("-")[2]) for each in peers]
        for i, each in zip(ids, peers, strict=True):
            for j in ids:
                until(lambda each=each, j=j, i=i: i == j or each.has(j, number), f"round {number} of peer {j} is here")

    def end(self) -> None:
        for each in reversed(
            self._started
        ):  # several may have had the same state directory, of which the last one runs
            each.end()


def up_command(peers: Peers, *options: str) -> dict[str, Any]:
    """Arguments for subprocess: ``crad-mesh up`` with light learners; peer i keeps its state in ``out/peers/i``."""
    path = os.pathsep.join(filter(None, [str(LIGHT), ENVIRONMENT.get("PYTHONPATH", "")]))
    command = [sys.executable, "-P", "-m", "launch", "up", "--peers", str(peers.file), "--out", "out", "--threads", "1"]
    environment = {**ENVIRONMENT, "PYTHONPATH": path, "LIGHT_CONTROL": str(peers.control), "COLUMNS": "1000"}
    return {"args": [*command, *options], "cwd": peers.folder, "env": environment}


def up(peers: Peers, *options: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """Run it to its end."""
    return subprocess.run(**up_command(peers, *options), capture_output=True, text=True, timeout=timeout)


def assert_one_sentence(output: str, code: int, expected: ExitCode, sentence: str) -> None:
    """The output is log lines and, last, one line for the user."""
    assert "Traceback" not in output
    assert "RuntimeWarning" not in output
    *log, last = [line for line in output.splitlines() if not re.match(r"E\d{4} .*add_port\.cc", line)]  # grpc's own
    assert re.fullmatch(f"crad-peer: .*{sentence}.*", last), output
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ peer \d+ (INFO|WARNING) ", line) for line in log), output
    assert code == expected
