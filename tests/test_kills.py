"""Kill anything, at any time: ten real peers, and in the end the same bytes as if nothing had happened.

What SIGKILL cannot show is what a power cut does to files that were not made durable; here they are torn by hand, and
the order in which a commit makes its files durable is tested in test_store.py.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import json
import os
import random
import re
import signal
import subprocess
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from processes import FORK_SERVER, Peer, federation_file, has_ended, until
from rich.console import Console

import peer.store
from crad_p2p.data.datasets import load_dataset
from crad_p2p.device import resolve_precision
from crad_p2p.errors import ExitCode
from crad_p2p.failpoints import LEARNER_POINTS, SERVICE_POINTS
from crad_p2p.federation import Federation, load_federation
from crad_p2p.manifest import ClassStatistics, Manifest
from crad_p2p.results import PeerResult, RoundRecord
from crad_p2p.simulation import simulate
from crad_p2p.snapshot import CHECKPOINT_FILE, SNAPSHOT_FILE, sha256_file
from launch.audit import show
from launch.quick import free_addresses
from peer._proto.crad.v1 import peer_pb2, peer_pb2_grpc
from peer.recorder import replay
from peer.store import Store
from peer.tls import Tls

CPU = torch.device("cpu")

ROOT = Path(__file__).parent.parent
ROUNDS = 4
#: Every shard has some thirty images, so that a round takes about a second of two cores.
SETTINGS: dict[str, Any] = {
    "federation": "killed",
    "data": {"dataset": "digits", "samples": 300, "partition": {"alpha": 2.0}},
    "training": {"batch_size": 16},
}
#: Seconds after which a mesh has hung: ten times what it takes on two cores.
PATIENCE = 500.0
#: Longer than every wait: what ends a call, a stream or a link to a peer that is silent takes 20, 30 and 3 + 4 seconds,
#: and the start wait and the linger time are set to 30.
STOPPED = 31.5
WAITS = {"CRAD_START_WAIT": "30", "CRAD_LINGER": "30"}

pytestmark = pytest.mark.timeout(600)


def federation_of(folder: Path, *, count: int = 10, rounds: int = ROUNDS) -> Path:
    archs = ("cnn6@0.125", "resnet18@0.125")
    addresses = free_addresses(count)
    peers = [{"id": i, "address": addresses[i], "arch": archs[i % 2]} for i in range(count)]
    return federation_file(folder, peers=peers, rounds=rounds, **SETTINGS)


@dataclass(frozen=True)
class Undisturbed:
    """What a run gives that nobody disturbs."""

    results: dict[int, PeerResult]
    history: list[RoundRecord]

    def digests(self, i: int) -> list[tuple[int, str]]:
        return [(record.round, record.snapshot_sha256) for record in self.history if record.peer == i]


def simulated(file: Path) -> Undisturbed:
    federation = load_federation(file)
    dataset = load_dataset(federation.data, seed=federation.seed, data_dir=file.parent)
    summary, history = simulate(federation, dataset, device=CPU, precision=resolve_precision("auto", CPU), threads=1)
    return Undisturbed({result.id: result for result in summary.peers}, history)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """Of ten peers over ROUNDS rounds."""
    return simulated(federation_of(tmp_path_factory.mktemp("undisturbed")))


class Mesh:
    """Real peers, and all starts of each. The learners of many are forked, those of two are children of the service."""

    def __init__(self, folder: Path, file: Path) -> None:
        self.folder = folder
        self.file = file
        self.federation: Federation = load_federation(file)
        self.starts: dict[int, list[Peer]] = {i: [] for i in self.federation.ids}

    def start(self, i: int, *, state: Path | None = None, **environment: str) -> Peer:
        state = state or self.folder / f"peer{i}"
        options = ["--id", str(i), "--peers", str(self.file), "--state-dir", str(state)]
        options += ["--device", "cpu", "--threads", "1"]
        forking = FORK_SERVER.entries() if len(self.starts) > 2 else {}
        self.starts[i].append(Peer(self.folder, *options, state=state, **forking, **environment))
        return self.starts[i][-1]

    def start_all(self, **environment: str) -> None:
        for i in self.starts:
            self.start(i, **environment)

    def now(self, i: int) -> Peer:
        """The newest start of a peer."""
        return self.starts[i][-1]

    def until(self, test: Callable[[], Any], what: str, seconds: float = PATIENCE) -> None:
        """A bounded poll that says, if it fails, where every peer is."""
        try:
            until(test, what, seconds)
        except AssertionError as error:
            said = [f"--- peer {i}\n" + "\n".join(self.log(i).splitlines()[-5:]) for i in self.starts]
            raise AssertionError("\n".join([str(error), *said])) from None

    def until_complete(self, restart: Callable[[int], bool] = lambda _: False) -> None:
        """Until every peer has ended with 0; ``restart`` is asked about one that was killed, and starts it again."""
        running = set(self.starts)

        def all_ended() -> bool:
            for i in sorted(running):
                code = self.now(i).process.poll()
                if code is None or (code == -signal.SIGKILL and restart(i)):
                    continue
                assert code == ExitCode.COMPLETE, f"peer {i} ended with {code}:\n{self.log(i)}"
                running.remove(i)
            return not running

        self.until(all_ended, "all peers end")

    def log(self, i: int) -> str:
        """What all starts of a peer have printed."""
        return "".join(each.output for each in self.starts[i])

    def kill_all(self) -> None:
        """Services and learners, in one go."""
        for i in self.starts:
            self.now(i).process.kill()
            learner = self.now(i).learner()
            if learner and not has_ended(learner, self.now(i).state):
                with suppress(ProcessLookupError):  # it ends with its service
                    os.kill(learner, signal.SIGKILL)
        for i in self.starts:
            assert self.now(i).ended() == -signal.SIGKILL, self.log(i)
            until(lambda: has_ended(self.now(i).learner(), self.now(i).state), "the learner is gone", 10)  # noqa: B023

    def end(self) -> None:
        for i, peers in self.starts.items():
            running = [each.process.pid for each in peers if each.process.poll() is None]
            if peers and (learner := self.now(i).learner()) and not has_ended(learner, self.now(i).state):
                running.append(learner)  # it may be stopped, and would not see that its service ends
            for pid in running:
                with suppress(ProcessLookupError):  # a learner ends with its service
                    os.kill(pid, signal.SIGKILL)
        for peers in self.starts.values():
            for each in peers:
                each.end()


@contextmanager
def mesh_of(folder: Path, **settings: int) -> Iterator[Mesh]:
    """All processes have ended afterwards."""
    mesh = Mesh(folder, federation_of(folder, **settings))
    try:
        yield mesh
    finally:
        mesh.end()


def assert_undisturbed(mesh: Mesh, expected: Undisturbed) -> None:
    """Bytes, history and results of all peers are those of the run that nobody disturbed."""
    for i in mesh.starts:
        here, log = mesh.now(i), mesh.log(i)
        assert "Traceback" not in log
        assert "the learner is not forked" not in log
        history = here.history()
        assert [(record.round, record.snapshot_sha256) for record in history] == expected.digests(i), i
        others = tuple(j for j in mesh.starts if j != i)
        for record in history:
            assert (record.teachers, record.redone) == (others, 0)
            assert record.missing_teachers == record.stale_teachers == record.quarantined_teachers == ()
        tree = json.loads((here.state / "result.json").read_text())
        result, simulation = PeerResult.from_json(tree), expected.results[i]
        for field in ("snapshot_sha256", "best_round", "global_accuracy", "local_accuracy", "counts", "hits"):
            assert getattr(result, field) == getattr(simulation, field), (i, field)
        last = here.state / f"rounds/{here.last_round():06d}"
        assert (here.last_round(), sha256_file(last / SNAPSHOT_FILE)) == expected.digests(i)[-1]
        assert not (here.state / "conflicts").exists()
        published = Counter(re.findall(r"round \d+ of \d+ is published", log))
        assert set(published.values()) <= {1}, f"peer {i} published a round twice: {published}"
        assert has_ended(here.learner(), here.state)
        assert [*here.state.glob("rounds/.*"), *here.state.glob("received/*/*.partial")] == []
        assert all(step.agrees for step in replay(here.state / "events.jsonl"))  # over all starts


# --- a kill at every fail point ---------------------------------------------------------------------------------------


def called_with() -> list[tuple[str, ast.expr]]:
    """The module and the first argument of every call of ``fail_point`` in the sources."""
    found = []
    for package in ("crad_p2p", "peer", "launch"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "fail_point":
                    found.append((".".join(path.relative_to(ROOT).with_suffix("").parts), node.args[0]))
    return found


def names_of(module: str, argument: ast.expr) -> list[str]:
    """The listed names that a call may pass; those it passes and that are not listed, too, where they can be known."""
    match argument:
        case ast.Constant(value=str(name)):
            return [name]
        case ast.Subscript(value=ast.Name(id=table)):
            return list(getattr(importlib.import_module(module), table).values())
        case ast.JoinedStr(values=parts):
            pattern = "".join(re.escape(part.value) if isinstance(part, ast.Constant) else ".+" for part in parts)
            return [name for name in SERVICE_POINTS + LEARNER_POINTS if re.fullmatch(pattern, name)]
    raise AssertionError(f"{module} passes fail_point something that this test cannot read: {ast.dump(argument)}")


def test_every_call_has_a_listed_name_and_every_name_a_call() -> None:
    calls = called_with()
    passed = {
        side: {name for module, argument in calls for name in names_of(module, argument) if side in module}
        for side in ("peer.", "crad_p2p.")
    }
    assert passed == {"peer.": set(SERVICE_POINTS), "crad_p2p.": set(LEARNER_POINTS)}
    assert len(SERVICE_POINTS + LEARNER_POINTS) == len(set(SERVICE_POINTS + LEARNER_POINTS))


def test_a_commit_passes_its_points_in_the_listed_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their names are put together of file names, which no static test sees."""
    passed = []
    monkeypatch.setattr(peer.store, "fail_point", lambda name, number: passed.append((name, number)))
    store = Store(tmp_path)
    store.open(load_federation(federation_of(tmp_path, count=1)), 0)
    commit(store, 3)
    store.close()
    first, last = map(SERVICE_POINTS.index, ("commit-begun", "after-fsync-rounds"))
    assert passed == [(name, 3) for name in SERVICE_POINTS[first : last + 1]]


def commit(store: Store, number: int) -> None:
    staging = store.staging_dir(number)
    for name in (SNAPSHOT_FILE, CHECKPOINT_FILE):
        (staging / name).write_bytes(b"bytes")
    manifest = Manifest(
        run="0" * 64,
        peer=0,
        round=number,
        arch="cnn6@0.125",
        size=5,
        sha256=hashlib.sha256(b"bytes").hexdigest(),
        statistics=ClassStatistics(counts=(1,), hits=(1,), predicted=(1,)),
        consumed=(),
        model_round=number,
        missing=(),
        quarantined=(),
    )
    store.commit(staging, manifest, RoundRecord(0, number, manifest.sha256, 1.0))


@dataclass(frozen=True)
class Kill:
    """A process is killed when it comes by a fail point in a round; ``both``: the learner, and the service with it."""

    point: str
    round: int
    both: bool = False

    @property
    def ends_service(self) -> bool:
        return self.both or self.point in SERVICE_POINTS

    def environment(self, folder: Path, i: int) -> dict[str, str]:
        value = f"{self.point}@{self.round}" + "@both" * self.both
        return {"CRAD_FAIL_POINT": value, "CRAD_FAIL_MARKER": str(self.marker(folder, i))}

    def marker(self, folder: Path, i: int) -> Path:
        return folder / f"peer{i}-{self.point}@{self.round}{'@both' * self.both}.killed"


def schedule() -> dict[int, list[Kill]]:
    """One kill a peer and round: every point of the service, every one of the learner with and without its service.

    A service that is started again is given its next point; so a kill of the learner alone comes last. For every other
    peer the rounds are 1 to 4, which is the last, instead of 0 to 3.
    """
    ending = [(name, False) for name in SERVICE_POINTS] + [(name, True) for name in LEARNER_POINTS]
    random.Random(20).shuffle(ending)  # so that those of one round fall in all its phases
    first = [each for each in ending if each[0] not in ("train-sent", "opened", "teaching", "taught", "training")][:10]
    dealt = first + [each for each in ending if each not in first] + [(name, False) for name in LEARNER_POINTS]
    return {i: [Kill(point, r, both) for r, (point, both) in enumerate(dealt[i::10], start=i % 2)] for i in range(10)}


def test_the_schedule_has_every_point_and_every_learner_point_also_with_the_service() -> None:
    kills = [kill for of_peer in schedule().values() for kill in of_peer]
    expected = [(name, False) for name in SERVICE_POINTS + LEARNER_POINTS] + [(name, True) for name in LEARNER_POINTS]
    assert sorted((kill.point, kill.both) for kill in kills) == sorted(expected)
    assert all(kill.ends_service for of_peer in schedule().values() for kill in of_peer[:-1])


def test_killed_at_every_fail_point(tmp_path: Path, undisturbed: Undisturbed) -> None:
    kills = schedule()
    with mesh_of(tmp_path) as mesh:
        due = {i: deque(of_peer) for i, of_peer in kills.items()}

        def start(i: int) -> None:
            mesh.start(i, **(due[i][0].environment(tmp_path, i) if due[i] else {}))

        def restart(i: int) -> bool:
            kill = due[i].popleft() if due[i] else None
            assert kill is not None, f"peer {i} was killed once too often"
            assert kill.ends_service, kill
            assert kill.marker(tmp_path, i).exists(), kill
            start(i)
            return True

        for i in kills:
            start(i)
        mesh.until_complete(restart)
        for i, of_peer in kills.items():
            assert [kill for kill in of_peer if not kill.marker(tmp_path, i).exists()] == []
            services = sum(kill.ends_service for kill in of_peer)
            assert [each.process.returncode for each in mesh.starts[i]] == [-signal.SIGKILL] * services + [0]
            again = mesh.log(i).count("the learner process was killed by SIGKILL; starting it again")
            assert again == len(of_peer) - services
        assert_undisturbed(mesh, undisturbed)
        for i in mesh.starts:  # no kill has cost a manifest
            show(Console(file=StringIO()), mesh.now(i).state, tmp_path / "crad-tls/ca.pem", None)


# --- all at once ------------------------------------------------------------------------------------------------------


def tear(mesh: Mesh, rng: random.Random) -> Counter[str]:
    """What a power cut may do to all that was not made durable; how often it was done to which kind of file."""
    done: Counter[str] = Counter()
    for i in mesh.starts:
        state = mesh.now(i).state
        staging = state / "rounds/.staging-000099"  # one at least is there
        staging.mkdir()
        for path in (staging / SNAPSHOT_FILE, state / "best.json.partial", state / "history.jsonl.partial"):
            path.write_bytes(b"half")
        files = {
            "received manifest": state.glob("received/*/*.json"),
            "received snapshot": state.glob("received/*/*.safetensors"),
            "partial": [*state.glob("received/*/*.partial"), *state.glob("*.partial")],
            "staging": state.glob("rounds/.staging-*/*"),
            "scratch": [path for path in state.glob("scratch/**/*") if path.is_file()],
        }
        for kind, paths in files.items():
            for path in sorted(paths):
                _tear(path, rng)
                done[kind] += 1
        for name in ("history.jsonl", "events.jsonl"):
            path = state / name
            if path.exists() and (lines := path.read_bytes().splitlines(keepends=True)):
                lines[-1] = lines[-1][: rng.randrange(len(lines[-1]))]
                path.write_bytes(b"".join(lines))
                done[name] += 1
    return done


def _tear(path: Path, rng: random.Random) -> None:
    content = path.read_bytes()
    cut = rng.randrange(len(content) + 1)
    path.write_bytes(rng.choice((b"", content[:cut], bytes(len(content)), content[:cut] + bytes(len(content) - cut))))


def test_all_killed_at_once_and_their_unfinished_files_torn(tmp_path: Path, undisturbed: Undisturbed) -> None:
    rng = random.Random(8)
    with mesh_of(tmp_path) as mesh:

        def committed() -> int:
            return sum(1 + mesh.now(i).last_round() for i in mesh.starts)

        def recorded() -> int:
            """Bytes of recorded events: how far the mesh is within a round, whatever the speed of the machine."""
            return sum(path.stat().st_size for path in tmp_path.glob("peer*/events.jsonl"))

        mesh.start_all()
        least = rng.choice(range(21, 36))
        mesh.until(lambda: committed() >= least, f"{least} committed rounds")
        moment = recorded() + rng.randrange(15_000)
        mesh.until(lambda: recorded() >= moment, "the moment of the kill")
        mesh.kill_all()
        assert least <= committed() < 10 * (1 + ROUNDS)
        done = tear(mesh, rng)
        assert done["received manifest"] > 10
        assert done["received snapshot"] > 10
        assert done["history.jsonl"] == done["events.jsonl"] == 10
        mesh.start_all()
        mesh.until_complete()
        assert_undisturbed(mesh, undisturbed)
        assert "is torn and will be fetched again" in "".join(map(mesh.log, mesh.starts))


# --- stopped ----------------------------------------------------------------------------------------------------------


def served(mesh: Mesh, i: int) -> tuple[peer_pb2.PeerState, str]:
    """What a service says of itself, and the digest of the last round as it sends it."""
    address = mesh.federation.peer(i).address
    tls = Tls(mesh.folder / f"crad-tls/{i}", mesh.federation.federation, i)  # a site may look at its own peer
    options = [("grpc.enable_http_proxy", 0), *tls.channel_options(i)]
    with grpc.secure_channel(address, tls.channel_credentials(), options=options) as channel:
        stub = peer_pb2_grpc.PeerStub(channel)
        watch = stub.Watch(peer_pb2.WatchRequest(), timeout=60)
        state = next(watch)
        watch.cancel()
        request = peer_pb2.GetManifestRequest(peer=i, round=state.round)
        manifest = Manifest.from_bytes(stub.GetManifest(request, timeout=60).document)
        wanted = peer_pb2.GetSnapshotRequest(peer=i, round=state.round, sha256=manifest.sha256)
        content = b"".join(chunk.data for chunk in stub.GetSnapshot(wanted, timeout=60))
        return state, hashlib.sha256(content).hexdigest()


def waited_for(explanation: str) -> set[int]:
    """The peers that a state names as those it waits for; the empty set where it does something else."""
    found = re.fullmatch(r"round \d+ waits for (?:round \d+|the snapshots) of peers? (.*)", explanation)
    return {int(name.split()[0]) for name in found[1].split(", ")} if found else set()


def test_stopped_for_longer_than_every_wait(tmp_path: Path, undisturbed: Undisturbed) -> None:
    with mesh_of(tmp_path) as mesh:
        mesh.start_all(**WAITS)
        mesh.until(lambda: all(mesh.now(i).last_round() >= 1 for i in mesh.starts), "round 1 everywhere")
        service, learner, whole, killed = 1, 2, 3, 4
        processes = {
            service: [mesh.now(service).process.pid],
            learner: [mesh.now(learner).learner()],
            whole: [mesh.now(whole).learner(), mesh.now(whole).process.pid],
            killed: [mesh.now(killed).learner(), mesh.now(killed).process.pid],
        }
        for pids in processes.values():
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
        stopped = time.monotonic()

        others = [i for i in mesh.starts if i not in processes]
        unheard = {service, whole, killed}

        def say_so() -> bool:
            """Whether all others wait, say for whom, and serve what they have."""
            states = {i: served(mesh, i) for i in others}
            assert all((state.round, digest) in undisturbed.digests(i) for i, (state, digest) in states.items())
            slowest = min(state.round for state, _ in states.values())
            behind = {i for i, (state, _) in states.items() if state.round == slowest}
            for state, _ in states.values():
                names = waited_for(state.explanation)
                # One that is a round ahead may wait for one that is not stopped, and waits itself.
                if not names or not names <= processes.keys() | (behind if state.round > slowest else set()):
                    return False
                if {j for j in names if f"{j} (not connected)" in state.explanation} != names & unheard:
                    return False
            return True

        mesh.until(say_so, "the others say whom they wait for")
        state, digest = served(mesh, learner)  # whose service goes on
        assert (state.round, digest) in undisturbed.digests(learner)
        time.sleep(max(0.0, stopped + STOPPED - time.monotonic()))
        assert say_so()
        for i in others:
            assert all(re.search(f"peer {j} at .*; trying again", mesh.log(i)) for j in unheard)
        assert [i for i in mesh.starts if mesh.now(i).process.poll() is not None] == []

        mesh.now(killed).process.kill()
        assert mesh.now(killed).ended() == -signal.SIGKILL
        left = processes.pop(killed)[0]
        until(lambda: has_ended(left, mesh.now(killed).state), "a stopped learner ends with its service", 10)
        mesh.start(killed)
        for pids in processes.values():
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        mesh.until_complete()
        assert_undisturbed(mesh, undisturbed)


# --- the learner alone ------------------------------------------------------------------------------------------------


def test_a_service_goes_on_serving_while_its_learner_is_killed_and_started_again(tmp_path: Path) -> None:
    with mesh_of(tmp_path, count=2) as mesh:
        expected = simulated(mesh.file)
        kill = Kill("teaching", 2)
        mesh.start(1)
        first = mesh.start(0, **kill.environment(tmp_path, 0))
        mesh.until(first.learner, "the first learner")
        killed = first.learner()
        mesh.until(lambda: first.learner() not in (0, killed), "the service starts another learner")
        assert kill.marker(tmp_path, 0).exists()
        # Held while it starts, so that there is none for as long as it takes to look.
        os.kill(first.learner(), signal.SIGSTOP)
        assert first.output.count("the learner process was killed by SIGKILL; starting it again") == 1
        mesh.until(lambda: waited_for(served(mesh, 1)[0].explanation) == {0}, "peer 1 waits for peer 0")
        for _ in range(2):
            state, digest = served(mesh, 0)
            assert state.explanation == "the learner process is starting"
            assert (state.round, digest) == expected.digests(0)[0]
        os.kill(first.learner(), signal.SIGCONT)
        mesh.until_complete()
        assert_undisturbed(mesh, expected)
        assert mesh.starts[0] == [first]


# --- a full disk ------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of a few megabytes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(mount, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if mounted.returncode:
        pytest.skip(f"a file system of its own can only be mounted by root: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(path: Path) -> None:
    """Take all space that is left."""
    with path.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 8):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                pass


def test_a_full_disk_ends_a_peer_with_a_sentence_and_space_lets_it_continue(small_disk: Path, tmp_path: Path) -> None:
    rounds = 12
    with mesh_of(tmp_path, count=2, rounds=rounds) as mesh:
        expected = simulated(mesh.file)
        mesh.start(0)
        state, filler = small_disk / "peer1", small_disk / "filler"
        mesh.start(1, state=state).reach(2)
        for _ in range(2):  # while it runs, and at its start
            fill(filler)
            here = mesh.now(1)
            assert here.ended() == ExitCode.INCOMPLETE, here.output
            last = here.output.splitlines()[-1]
            assert re.fullmatch(
                rf"crad-peer: {small_disk}.*: No space left on device.* start the same command again.*", last
            )
            assert "Traceback" not in here.output
            number = here.last_round()
            assert 2 <= number < rounds
            store = Store(state)
            store.open(mesh.federation, 1)
            store.check_rounds()
            store.close()
            assert (number, store.manifest(number).sha256) == expected.digests(1)[number - 1]
            mesh.start(1, state=state)
        filler.unlink()
        mesh.until_complete()
        assert_undisturbed(mesh, expected)
