"""``crad-mesh check``: every finding, with real sockets and peers where these matter, and what it ends with."""

from __future__ import annotations

import asyncio
import io
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from processes import ENVIRONMENT, LIGHT, Peers, certificates, federation_file, free_port, until
from rich.console import Console

from crad_p2p.errors import ConfigurationError, DataError, ExitCode, LearnerFailedError
from crad_p2p.federation import load_federation
from crad_p2p.snapshot import TensorSpec
from launch.authority import new_authority, throwaway, to_pem
from launch.check import Check, show, verdict
from launch.preflight.greet import Caller, Greeting, WrongAnswerError
from launch.preflight.here import check_certificate, check_state
from launch.preflight.learner import describe_failure
from launch.preflight.others import Other, judge, judge_calls, judge_refusals
from peer._proto.crad.v1 import peer_pb2
from peer.credentials import load_credentials
from peer.disk_space import DiskNeed, check_disk, disk_need, free_bytes, used_bytes
from peer.findings import Finding, Level, failure, ok, warning
from peer.host import make_host
from peer.lock import Lock
from peer.memory_space import check_memory, free_memory, memory_need
from peer.proxies import check_proxies, elsewhere
from peer.store import Store
from peer.tls import Tls


@pytest.fixture(autouse=True)
def _light(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The learners that checks start are light."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(LIGHT), ENVIRONMENT.get("PYTHONPATH", "")])))
    monkeypatch.setenv("LIGHT_CONTROL", str(tmp_path))


def check_of(
    file: Path, peer: int = 0, *, wait: float = 5.0, environment: dict[str, str] | None = None, **given: Any
) -> Check:
    """A check with the defaults of the command; relative folders are beside the file."""
    federation = load_federation(file)
    options: dict[str, Any] = {
        "listen": None,
        "state_dir": file.parent / f"state-{peer}",
        "data_dir": None,
        "download": False,
        "device": "cpu",
        "precision": "auto",
        "threads": 1,
        "insecure": False,
        **given,
    }
    options.setdefault("tls_dir", None if options["insecure"] else file.parent / "crad-tls" / str(peer))
    return Check(federation, make_host(federation, peer, file, **options), wait, environment or {})


async def collect(check: Check) -> dict[str, Finding]:
    found = [finding async for finding in check.findings()]
    assert len({finding.what for finding in found}) == len(found)
    return {finding.what: finding for finding in found}


def found(file: Path, peer: int = 0, **given: Any) -> dict[str, Finding]:
    return asyncio.run(collect(check_of(file, peer, **given)))


def failures(findings: dict[str, Finding]) -> list[tuple[str, ExitCode]]:
    return [(each.what, each.exit_code) for each in findings.values() if each.level is Level.FAILURE]


def command(folder: Path, *options: str, light: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command, run to its end."""
    path = os.environ["PYTHONPATH"] if light else ENVIRONMENT.get("PYTHONPATH", "")
    return subprocess.run(
        [sys.executable, "-P", "-m", "launch", "check", "--peers", "peers.yaml", "--device", "cpu", *options],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        env={**ENVIRONMENT, "PYTHONPATH": path, "LIGHT_CONTROL": str(folder), **environment},
    )


@contextmanager
def listener(port: int, *, closes: bool = False) -> Iterator[None]:
    """Another program at a port of this machine, which says nothing, or takes connections and closes them."""
    with socket.create_server(("127.0.0.1", port)) as server:
        if closes:

            def close_all() -> None:
                try:
                    while True:
                        server.accept()[0].close()
                except OSError:
                    return

            threading.Thread(target=close_all, daemon=True).start()
        yield
        server.shutdown(socket.SHUT_RDWR)


# --- the command ------------------------------------------------------------------------------------------------------


def test_a_peer_alone_with_its_real_learner(tmp_path: Path) -> None:
    federation_file(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    ended = command(tmp_path, "--id", "0", light=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    *lines, empty, last = ended.stdout.splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["ok", what] for what in ("federation", "certificate", "state", "address", "data", "memory", "disk", "proxies")
    ]
    assert re.search(
        r"\d+ training images here; 10 classes, images 1x8x8, all labels in range; learner on cpu$", lines[4]
    )
    assert re.search(r"GB free on this machine; a step of training takes at least [\d.]+ MB$", lines[5])
    assert (empty, last) == ("", "All is well: peer 0 can be started, by 'crad-peer' with the same options.")
    assert sorted(tmp_path.rglob("*")) == before


def test_whoever_reads_only_the_beginning_gets_no_traceback(tmp_path: Path) -> None:
    federation_file(tmp_path)
    options = ["check", "--id", "0", "--peers", "peers.yaml", "--device", "cpu"]
    environment = {**ENVIRONMENT, "PYTHONPATH": os.environ["PYTHONPATH"], "LIGHT_CONTROL": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "launch", *options],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        for what in ("federation", "certificate", "state"):
            assert process.stdout.readline().split()[:2] == ["ok", what]
        process.stdout.close()  # as head(1) does
        assert process.stderr.read() == "crad-mesh: its output was closed before the end\n"
        assert process.wait(20) == ExitCode.INCOMPLETE


def test_no_data(tmp_path: Path) -> None:
    federation_file(tmp_path, data={"dataset": "npz:images.npz"})
    ended = command(tmp_path, "--id", "0", light=False)
    assert ended.returncode == ExitCode.DATA
    assert re.search(r"^failure  data +.*images\.npz: not found; give the path", ended.stdout, re.MULTILINE)
    assert ended.stdout.splitlines()[-1] == "1 failure: mend what failed, and check peer 0 again."


def test_what_keeps_a_learner_from_starting_is_not_always_the_data() -> None:
    for error, what in ((ConfigurationError, "device"), (LearnerFailedError, "learner"), (DataError, "data")):
        finding = describe_failure(error("it is so"))
        assert (finding.what, finding.text, finding.exit_code) == (what, "it is so", error.exit_code)


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--id", "9"], ExitCode.CONFIGURATION, "peer id 9 is not in the federation file"),
        (["--id", "0", "--listen", "nowhere"], ExitCode.USAGE, "--listen: address 'nowhere' must be HOST:PORT"),
        (["--id", "0", "--insecure", "--tls-dir", "x"], ExitCode.USAGE, "contradict each other"),
    ],
)
def test_what_cannot_even_be_checked(tmp_path: Path, options: list[str], code: ExitCode, said: str) -> None:
    federation_file(tmp_path)
    ended = command(tmp_path, *options)
    assert (ended.returncode, ended.stdout) == (code, "")
    assert said in ended.stderr


def test_options_come_from_the_environment_and_warnings_are_no_failure(tmp_path: Path) -> None:
    peers = [{"id": i, "address": f"127.0.0.1:{free_port()}", "arch": "cnn6@0.125"} for i in range(2)]
    federation_file(tmp_path, peers=peers)
    ended = command(tmp_path, "--wait", "0", CRAD_ID="1", CRAD_STATE_DIR="here")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "here is new" in ended.stdout
    assert re.search(r"^warning  peer 0 +127\.0\.0\.1:\d+ has not been reached .*refused", ended.stdout, re.MULTILINE)
    assert re.search(r"^warning  reachable +nobody is up", ended.stdout, re.MULTILINE)
    assert ended.stdout.splitlines()[-1].startswith("2 warnings: peer 1 can be started")


# --- certificates -----------------------------------------------------------------------------------------------------


def test_a_key_that_others_can_read_ends_with_the_code_of_certificates(tmp_path: Path) -> None:
    peers = [{"id": i, "address": f"127.0.0.1:{free_port()}", "arch": "cnn6@0.125"} for i in range(2)]
    federation_file(tmp_path, peers=peers)
    (tmp_path / "crad-tls/0/peer.key").chmod(0o644)
    ended = command(tmp_path, "--id", "0")
    assert ended.returncode == ExitCode.CERTIFICATE
    assert re.search(r"^failure  certificate .*peer\.key: has mode 0644.*chmod 600", ended.stdout, re.MULTILINE)
    assert re.search(r"^warning  others +not called", ended.stdout, re.MULTILINE)
    assert re.search(r"^ok +data", ended.stdout, re.MULTILINE)  # all is said at once


def test_files_that_grpc_alone_would_not_take_are_right(tmp_path: Path) -> None:
    """Two CAs, and no newline between them."""
    file = federation_file(tmp_path)
    path, other = tmp_path / "crad-tls/0/ca.pem", new_authority("one")
    path.write_bytes(path.read_bytes().rstrip() + to_pem(other.certificate))
    assert failures(found(file)) == []


def test_files_that_only_grpc_refuses_are_not_taken_for_a_port_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = federation_file(tmp_path)
    monkeypatch.setattr(Tls, "server_credentials", lambda _: grpc.ssl_server_credentials([(b"no key", b"nothing")]))
    findings = found(file)
    assert failures(findings) == [("address", ExitCode.CERTIFICATE)]
    assert "gRPC does not take what is in ca.pem" in findings["address"].text


def test_a_certificate_about_to_expire(tmp_path: Path) -> None:
    now = datetime.now(UTC)
    throwaway(tmp_path, "one", [0], days=90)
    credentials = load_credentials(tmp_path / "0", "one", 0)
    assert check_certificate(credentials, now).level is Level.OK
    late = check_certificate(credentials, now + timedelta(days=70))
    assert late.level is Level.WARNING
    assert re.search(r"expires on .*, in 20 days; 'crad-mesh certs renew", late.text)


def test_an_expired_certificate(tmp_path: Path) -> None:
    file = federation_file(tmp_path)
    shutil.rmtree(tmp_path / "crad-tls")
    throwaway(tmp_path / "crad-tls", "one", [0], days=3, now=datetime.now(UTC) - timedelta(days=5))
    findings = found(file)
    assert failures(findings) == [("certificate", ExitCode.CERTIFICATE)]
    assert "expired on" in findings["certificate"].text


def test_plain_text_is_for_one_machine(tmp_path: Path) -> None:
    file = federation_file(tmp_path)
    assert failures(found(file, insecure=True)) == []
    findings = found(file, insecure=True, listen=f"0.0.0.0:{free_port()}")
    assert failures(findings) == [("certificate", ExitCode.CERTIFICATE)]


# --- state directory --------------------------------------------------------------------------------------------------


def test_the_state_directory_of_another_run(tmp_path: Path) -> None:
    file = federation_file(tmp_path)
    store = Store(tmp_path / "state-0")
    store.open(load_federation(file).model_copy(update={"rounds": 7}), 0)
    store.close()
    (tmp_path / "state-0/rounds/000000").mkdir()  # without any round it would belong to nobody
    findings = found(file)
    assert failures(findings) == [("state", ExitCode.CONFIGURATION)]
    assert "rounds is 7 in the state directory and 2 in the federation file" in findings["state"].text


def test_a_run_that_is_finished(tmp_path: Path) -> None:
    federation = load_federation(federation_file(tmp_path))
    store = Store(tmp_path / "state-0")
    store.open(federation, 0)
    store.close()
    for number, said in ((0, "goes on after round 0"), (2, "all 2 rounds are done")):
        store.round_dir(number).mkdir()
        assert said in check_state(store, federation, 0)[0].text


def test_a_state_directory_that_cannot_be_made(tmp_path: Path) -> None:
    file = federation_file(tmp_path)
    findings = found(file, state_dir=file / "state")
    assert failures(findings) == [("state", ExitCode.CONFIGURATION)]
    assert "peers.yaml is not a directory" in findings["state"].text


def test_who_holds_a_lock(tmp_path: Path) -> None:
    assert Lock(tmp_path / "none" / "lock").holder() is None
    lock, other = Lock(tmp_path / "lock"), Lock(tmp_path / "lock")
    lock.take("busy", "wait")
    assert other.holder() == str(os.getpid())
    lock.release()
    assert other.holder() is None
    lock.take("busy", "looking has not kept it")
    lock.release()


# --- the address ------------------------------------------------------------------------------------------------------


def test_a_port_that_another_program_has(tmp_path: Path) -> None:
    file = federation_file(tmp_path)
    port = int(load_federation(file).peer(0).address.rpartition(":")[2])
    with listener(port, closes=True):
        findings = found(file)
    assert failures(findings) == [("address", ExitCode.PORT_TAKEN)]
    assert re.search(r"the port is taken by another process; free it", findings["address"].text)
    assert failures(found(file)) == []


def test_an_address_of_another_machine(tmp_path: Path) -> None:
    file = federation_file(tmp_path)
    findings = found(file, listen="192.0.2.1:7400")  # reserved for documents
    assert failures(findings) == [("address", ExitCode.PORT_TAKEN)]
    assert re.search(
        r"not of this machine; if it is the address .* in the federation file.* behind NAT .*--listen 0\.0\.0\.0:7400",
        findings["address"].text,
    )


def test_this_peer_is_running(mesh: Callable[..., Peers]) -> None:
    peers = mesh(2)
    running = peers.start(0)
    running.says("listening on")
    until(lambda: "(not connected)" in running.explanation(), "peer 0 has its model, and waits")
    before = running.output
    check = check_of(peers.file, wait=0.0)
    findings = asyncio.run(collect(check))
    assert failures(findings) == []
    assert check.holder == str(running.process.pid)
    assert "is in use: this peer is running" in findings["state"].text
    assert "this peer is running" in findings["address"].text
    assert "answers at" in findings["address"].text
    assert "not looked at" in findings["data"].text
    assert (findings["running"].level, findings["peer 1"].level) == (Level.WARNING, Level.WARNING)
    assert "peer 1" in findings["running"].text
    assert verdict(list(findings.values()), 0, check.holder) == "2 warnings: peer 0 is running."
    assert "WARNING" not in running.output.removeprefix(before)
    # From another folder it looks like a stranger, but for its certificate.
    elsewhere_ = found(peers.file, wait=0.0, state_dir=peers.folder / "other")
    assert failures(elsewhere_) == [("address", ExitCode.PORT_TAKEN)]
    assert re.search(r"peer 0 is running there, with another state directory than", elsewhere_["address"].text)


def test_a_running_peer_that_is_not_reached_by_another_is_no_good_news(mesh: Callable[..., Peers]) -> None:
    """From here all is well; there, the address of this peer is wrong."""
    peers = mesh(2)
    zero = peers.start(0)
    peers.start(1, file=peers.write_file(peers.folder / "elsewhere", {0: free_port()}))
    zero.says("peer 1 at .*: connected")
    until(lambda: "waits for round 1 of peer 1" in zero.explanation(), "peer 0 is in round 1")
    findings = found(peers.file, wait=4.0)
    assert findings["running"].text == "this peer says: round 2 waits for round 1 of peer 1"
    assert findings["peer 1"].level is Level.WARNING
    assert "but it says: round 1 waits for round 0 of peer 0 (not connected)" in findings["peer 1"].text


# --- the others -------------------------------------------------------------------------------------------------------


def test_peers_that_run(mesh: Callable[..., Peers]) -> None:
    peers = mesh(3)
    for number in (1, 2):
        peers.start(number)
    findings = found(peers.file, wait=20.0)
    assert failures(findings) == []
    for number in (1, 2):
        assert re.search(
            r"answers: same version, federation and data; round trip \d+ ms, clock right to a second; "
            r"certificate of the CA ([0-9A-F]{2}:){3}[0-9A-F]{2}…, valid until \d{4}-\d\d-\d\d$",
            findings[f"peer {number}"].text,
        )
    assert re.fullmatch(r"peers 1, 2 have called 127\.0\.0\.1:\d+", findings["reachable"].text)
    assert {each.level for each in findings.values()} == {Level.OK}


@pytest.mark.parametrize("insecure", [False, True])
def test_two_sites_that_check_at_the_same_time(mesh: Callable[..., Peers], insecure: bool) -> None:
    peers = mesh(2)

    async def both() -> list[dict[str, Finding]]:
        return await asyncio.gather(
            *(collect(check_of(peers.file, number, wait=20.0, insecure=insecure)) for number in (0, 1))
        )

    for number, findings in enumerate(asyncio.run(both())):
        warned = {"certificate"} if insecure else set()  # plain text is worth a word
        assert {what for what, each in findings.items() if each.level is not Level.OK} == warned
        there = findings[f"peer {1 - number}"].text
        assert "answers, being checked, too: same version, federation and data" in there
        assert f"peer {1 - number} has called" in findings["reachable"].text


def test_another_federation_there(mesh: Callable[..., Peers]) -> None:
    peers = mesh(2)
    peers.start(1).says("listening on")
    other = peers.folder / "other"
    peers.settings["method"] = {"temperature": 4.0}
    file = peers.write_file(other)
    shutil.copytree(peers.folder / "crad-tls", other / "crad-tls", dirs_exist_ok=True)
    findings = found(file, wait=10.0)
    assert failures(findings) == [("peer 1", ExitCode.PEERS_DISAGREE)]
    assert re.search(
        r"method\.temperature is 3\.0 in the file of peer 1 and 4\.0 in the file of peer 0", findings["peer 1"].text
    )


def test_another_peer_at_the_address(mesh: Callable[..., Peers]) -> None:
    peers = mesh(3)
    peers.start(2).says("listening on")
    other = peers.folder / "other"
    file = peers.write_file(other, {1: peers.ports[2], 2: free_port()})
    shutil.copytree(peers.folder / "crad-tls", other / "crad-tls", dirs_exist_ok=True)
    findings = found(file, wait=0.0)
    assert failures(findings)[0] == ("peer 1", ExitCode.CERTIFICATE)
    assert "the certificate there is that of peer 2, expected that of peer 1" in findings["peer 1"].text


def test_a_certificate_of_another_ca_there(mesh: Callable[..., Peers]) -> None:
    peers = mesh(2)
    certificates(peers.folder / "stranger", "one", [1])
    peers.start(1, "--tls-dir", str(peers.folder / "stranger/crad-tls/1")).says("listening on")
    findings = found(peers.file, wait=0.0)
    assert failures(findings) == [("peer 1", ExitCode.CERTIFICATE)]
    assert "is not issued by a CA that is trusted here" in findings["peer 1"].text
    assert "compare the CA's fingerprint with the site of peer 1" in findings["peer 1"].remedy
    assert re.match(
        r"nobody has called .*: something answers at the address of peer 1, but with a certificate that is not trusted",
        findings["reachable"].text,
    )
    assert findings["reachable"].remedy.startswith("ask the site of peer 1, and whoever runs the CA")


def test_a_forwarded_port_without_a_peer_behind_it_is_a_warning(mesh: Callable[..., Peers]) -> None:
    peers = mesh(2)
    with listener(peers.ports[1], closes=True):
        findings = found(peers.file, wait=0.0)
    assert failures(findings) == []
    assert re.search(r"has not been reached .*closed", findings["peer 1"].text)


def test_plain_text_meets_a_peer_with_tls(mesh: Callable[..., Peers]) -> None:
    peers = mesh(2)
    peers.start(1).says("listening on")
    findings = found(peers.file, wait=0.0, insecure=True)
    assert "plain text, which peers with TLS do not take" in findings["certificate"].text
    assert findings["peer 1"].level is Level.WARNING
    assert "if a peer is there it probably expects TLS: leave --insecure out" in findings["peer 1"].text


def test_one_way_streets(mesh: Callable[..., Peers]) -> None:
    """Peer 1 looks for this one elsewhere; peer 2 is not where the file says, but calls."""
    peers = mesh(3)
    elsewhere_ = peers.folder / "elsewhere"
    peers.start(1, file=peers.write_file(elsewhere_, {0: free_port()})).says("listening on")
    peers.start(2, "--listen", f"127.0.0.1:{free_port()}").says("listening on")
    findings = found(peers.file, wait=4.0)
    assert failures(findings) == [("peer 2", ExitCode.INCOMPLETE)]
    assert "though that peer has called here" in findings["peer 2"].text
    assert findings["reachable"].level is Level.WARNING
    assert re.match(r"peer 1 is up, and has not called 127\.0\.0\.1:\d+ within 4 s", findings["reachable"].text)


def test_a_state_directory_that_lost_what_others_have_had(mesh: Callable[..., Peers]) -> None:
    peers = mesh(2)
    first, _ = peers.run_to(1)
    first.kill()
    findings = found(peers.file, wait=0.0, state_dir=peers.folder / "new")
    assert failures(findings) == [("peer 1", ExitCode.INCOMPLETE)]
    assert re.search(r"peer 1 has had round \d+ of this peer, and there is no round here", findings["peer 1"].text)


def judged(tmp_path: Path, *, ahead: float = 0.0, names: tuple[str, ...] = ("even", "odd")) -> Finding:
    peers = [{"id": i, "address": f"127.0.0.1:{7400 + i}", "arch": "cnn6@0.125"} for i in range(2)]
    federation = load_federation(federation_file(tmp_path, peers=peers))
    greeting = Greeting(peer_pb2.HelloReply(peer=1), is_check=False, round_trip=0.08, ahead=ahead)
    other = Other(1, "127.0.0.1:7401", greeting, state=peer_pb2.PeerState(data=peer_pb2.Data(class_names=names)))
    own = peer_pb2.Data(class_names=("even", "odd"))
    store = Store(tmp_path / "state")
    return judge(other, Caller(federation, 0, None), store, own, has_called=True, wait=10.0)


def test_the_clock_is_information_only(tmp_path: Path) -> None:
    late = judged(tmp_path, ahead=-600.2)
    assert late.level is Level.OK
    assert late.text.endswith("round trip 80 ms, clock 600 s behind, which does no harm")


def test_other_data_there(tmp_path: Path) -> None:
    differs = judged(tmp_path, names=("odd", "even"))
    assert (differs.level, differs.exit_code) == (Level.FAILURE, ExitCode.PEERS_DISAGREE)
    assert "'odd' as class 0 on peer 1 and 'even' on peer 0" in differs.text


def test_lines_about_calls() -> None:
    greeting = Greeting(peer_pb2.HelloReply(), is_check=False, round_trip=0.0, ahead=0.0)
    both = [Other(1, "a:1", greeting), Other(2, "b:1", greeting)]
    assert judge_calls(both, {1, 2}, "c:1", 10.0) == ok("reachable", "peers 1, 2 have called c:1")
    assert judge_calls(both, {2}, "c:1", 10.0).text == "peer 1 is up, and has not called c:1 within 10 s"
    assert judge_calls([Other(1, "a:1")], set(), "c:1", 10.0).level is Level.WARNING
    mistrusted = [Other(j, "a:1", wrong=WrongAnswerError(ExitCode.CERTIFICATE, "", "")) for j in (1, 2)]
    assert "something answers at the address of peers 1, 2" in judge_calls(mistrusted, set(), "c:1", 10.0).text
    assert judge_calls(mistrusted, {3}, "c:1", 10.0) == ok("reachable", "peer 3 has called c:1")
    other = [Other(1, "a:1", wrong=WrongAnswerError(ExitCode.PEERS_DISAGREE, "", ""))]
    assert judge_calls(other, set(), "c:1", 10.0).text.startswith("peer 1 answers, but runs something else")
    stranger = ("an unknown caller", "certificate")
    said = judge_refusals({stranger: 3}, {stranger: "10.0.0.7:41000"}).text
    assert "an unknown caller at 10.0.0.7:41000: certificate" in said
    assert "peer 7: not a member" in judge_refusals({("peer 7", "not a member"): 3}, {}).text


# --- disk, memory, proxies --------------------------------------------------------------------------------------------


def sized(tmp_path: Path, **changes: Any) -> Any:
    archs = ("resnet18", "cnn6", "cnn6")
    peers = [{"id": i, "address": f"127.0.0.1:{7400 + i}", "arch": arch} for i, arch in enumerate(archs)]
    return load_federation(federation_file(tmp_path, peers=peers, **changes))


LAYOUTS = {"resnet18": {"w": TensorSpec("F32", (1_000_000,))}, "cnn6": {"w": TensorSpec("F32", (250_000,))}}
WITH_PREDICTIONS = {**LAYOUTS, "predictions": {"predictions": TensorSpec("F32", (40, 5))}}
LARGE, SMALL = 4_000_129, 1_000_129  # bytes of the two files


def with_predictions(tmp_path: Path) -> Any:
    return sized(tmp_path, method={"name": "fedmd"}, data={"dataset": "digits", "transfer_samples": 40})


def test_what_goes_to_disk(tmp_path: Path) -> None:
    heard = 4 * 50 * 2
    need = disk_need(sized(tmp_path), 0, LAYOUTS, 50)
    assert need == DiskNeed(2 * LARGE + 2 * SMALL + heard, 8 * LARGE + 4 * SMALL + heard)
    stale = disk_need(sized(tmp_path, barrier={"policy": "quorum", "max_staleness": 4}), 1, LAYOUTS, 0)
    assert stale == DiskNeed(2 * SMALL + LARGE + SMALL, 8 * SMALL + 5 * (LARGE + SMALL))
    alone = disk_need(sized(tmp_path, method={"name": "local"}), 1, LAYOUTS, 50)
    assert alone == DiskNeed(2 * SMALL, 8 * SMALL)
    with_peak = disk_need(sized(tmp_path, method={"name": "dfml"}), 0, LAYOUTS, 50)
    assert with_peak == DiskNeed(3 * LARGE + 2 * SMALL + heard, 12 * LARGE + 4 * SMALL + heard)
    with_memory = disk_need(sized(tmp_path, method={"name": "fedmkd"}), 0, LAYOUTS, 50)
    assert with_memory == DiskNeed(2 * LARGE + 2 * SMALL + 600, 8 * LARGE + 4 * SMALL + 600)
    said = 4 * 40 * 5 + len("predictions") + 128
    predictions = disk_need(with_predictions(tmp_path), 0, WITH_PREDICTIONS, 50)
    assert predictions == DiskNeed(2 * LARGE + 3 * said, 8 * LARGE + (4 + 4) * said)


MADE = {"images-7": {"images": TensorSpec("U8", (7, 100)), "model_digest": TensorSpec("U8", (32,))}}
MADE |= {"images-6": {"images": TensorSpec("U8", (6, 100)), "model_digest": TensorSpec("U8", (32,))}}
MADE |= {"model_digest": {"model_digest": TensorSpec("U8", (32,))}, "predictions": {"p": TensorSpec("F32", (20, 2))}}


def test_what_goes_to_disk_where_the_peers_make_the_images(tmp_path: Path) -> None:
    made = sized(tmp_path, method={"name": "fedgd", "fedgd": {"images": 20, "first": 1}}, rounds=9)
    seven, six = (100 * n + 32 + len("imagesmodel_digest") + 2 * 128 for n in (7, 6))
    own = 2 * LARGE + seven + (2 * seven + six)
    need = disk_need(made, 0, LAYOUTS | MADE, 50)
    assert need == DiskNeed(own + seven + six, 4 * own + 2 * (seven + six))
    step = memory_need(made, 0, LAYOUTS | MADE, 7)
    assert step == 3 * 4_000_000 + 7 + 3 * (732 + 632) + 2 * (732 + 732 + 632)


def test_what_goes_to_disk_where_one_trains_for_all(tmp_path: Path) -> None:
    """One file of all models a round, whoever has it."""
    made = sized(tmp_path, method={"name": "dfml", "dfml": {"mode": "aggregator"}}, rounds=9)
    digest = {"model_digest": TensorSpec("U8", (32,))}
    layouts = {**LAYOUTS, "model_digest": digest, "bundle": {"all": TensorSpec("F32", (1_500_000,)), **digest}}
    tiny = 32 + len("model_digest") + 128
    whole = 6_000_000 + len("all") + 128 + tiny
    own = 2 * LARGE + whole
    assert disk_need(made, 0, layouts, 50) == DiskNeed(own + whole + tiny, 4 * own + 2 * (whole + tiny))
    assert memory_need(made, 1, layouts, 7) == 2 * 1_000_000 + 7 + 5 * 6_000_000


@pytest.mark.parametrize(
    ("free", "used", "level"),
    [
        (99, 0, Level.FAILURE),
        (100, 0, Level.WARNING),
        (60, 40, Level.WARNING),
        (199, 0, Level.WARNING),
        (200, 0, Level.OK),
    ],
)
def test_free_disk(free: int, used: int, level: Level) -> None:
    found = check_disk(DiskNeed(30, 100), Path("state"), free=free, used=used)
    assert found.level is level
    assert found.exit_code == (ExitCode.INCOMPLETE if level is Level.FAILURE else 0)


def test_bytes_of_a_state_directory(tmp_path: Path) -> None:
    assert used_bytes(tmp_path) == 0
    for name, size in (("rounds/000001/a", 10), ("received/000001/b", 5), ("history.jsonl", 7)):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(size))
    assert used_bytes(tmp_path) == 15
    assert free_bytes(tmp_path / "not/there/yet") == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.1)


def test_what_training_takes(tmp_path: Path) -> None:
    assert memory_need(sized(tmp_path), 0, LAYOUTS, 7) == 3 * 4_000_000 + 7 + 2 * 1_000_000
    assert memory_need(sized(tmp_path), 1, LAYOUTS, 7) == 3 * 1_000_000 + 7 + 2 * 4_000_000
    assert memory_need(sized(tmp_path, method={"name": "local"}), 1, LAYOUTS, 7) == 3 * 1_000_000 + 7
    assert memory_need(sized(tmp_path, method={"name": "dfml"}), 0, LAYOUTS, 7) == 4 * 4_000_000 + 7 + 2 * 1_000_000
    assert memory_need(sized(tmp_path, method={"name": "fedmkd"}), 0, LAYOUTS, 7) == 3 * 4_000_000 + 7 + 2 * 4_000_000
    assert memory_need(with_predictions(tmp_path), 1, WITH_PREDICTIONS, 7) == 3 * 1_000_000 + 7 + 3 * 2 * 800


@pytest.mark.parametrize(
    ("free", "level"),
    [(99, Level.FAILURE), (100, Level.WARNING), (199, Level.WARNING), (200, Level.OK), (None, Level.OK)],
)
def test_free_memory(free: int | None, level: Level) -> None:
    found = check_memory(100, free, "cuda:0")
    assert found.level is level
    assert found.exit_code == (ExitCode.LEARNER_FAILED if level is Level.FAILURE else 0)


def test_memory_of_machine_and_control_groups(tmp_path: Path) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "groups"
    assert free_memory(proc, groups) is None

    def write(path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    write(proc / "meminfo", "MemTotal: 9000 kB\nMemAvailable:    5000 kB\n")
    assert free_memory(proc, groups) == 5_000 * 1024
    write(proc / "self/cgroup", "0::/pod/box\n")
    for name, text in (("max", "max"), ("current", "10"), ("stat", "inactive_file 1\n")):
        write(groups / f"pod/box/memory.{name}", text)
    assert free_memory(proc, groups) == 5_000 * 1024  # no limit
    for name, text in (("max", "3000"), ("current", "1500"), ("stat", "anon 3\ninactive_file 400\n")):
        write(groups / f"pod/memory.{name}", text)
    assert free_memory(proc, groups) == 1_900  # the group above has one; its cache can be had back
    write(proc / "self/cgroup", "4:cpu,memory:/old\n")
    for name, text in (("limit_in_bytes", "900"), ("usage_in_bytes", "500"), ("stat", "total_inactive_file 100\n")):
        write(groups / f"memory/old/memory.{name}", text)
    assert free_memory(proc, groups) == 500


def test_proxy_variables(tmp_path: Path) -> None:
    assert check_proxies({"NO_PROXY": "a", "http_proxy": ""}, [1]).text == "no proxy variable is set"
    environment = {"HTTPS_PROXY": "http://user:secret@proxy:3128", "all_proxy": "socks5://proxy"}
    reached, not_reached = check_proxies(environment, []), check_proxies(environment, [1, 2])
    assert (reached.level, not_reached.level) == (Level.OK, Level.WARNING)
    assert not_reached.text == "HTTPS_PROXY, all_proxy are set, and peers do not use proxies"
    assert "a direct TCP route to peers 1, 2" in not_reached.remedy
    assert "secret" not in not_reached.sentence
    peers = [
        {"id": i, "address": address} for i, address in enumerate(("a.example.org:1", "127.0.0.1:2", "b.example.org:3"))
    ]
    assert elsewhere(load_federation(federation_file(tmp_path, peers=peers)), 0) == (2,)


def test_a_peer_without_room_for_one_round_ends_before_it(mesh: Callable[..., Peers]) -> None:
    peers = mesh(1)
    peer = peers.start(0, LIGHT_FLOATS=str(8 * 10**13))
    assert peer.ended() == ExitCode.INCOMPLETE
    assert re.fullmatch(
        r"crad-peer: .* free for .*state-0, and two rounds take \d+ TB; make room there, and start the same .*",
        peer.last_words(),
    )
    assert peer.last_round() == -1


def test_a_peer_says_at_its_start_what_may_be_too_little(mesh: Callable[..., Peers], tmp_path: Path) -> None:
    peers = mesh(1, rounds=1)
    far = peers.folder / "far"
    far.mkdir()
    both = [{"id": 0, "address": f"127.0.0.1:{peers.ports[0]}"}, {"id": 1, "address": "192.0.2.1:7400"}]
    file = federation_file(far, peers=[{**each, "arch": "cnn6@0.125"} for each in both])
    # A file system is never so large that it would do for four rounds, and not for one.
    room = shutil.disk_usage(tmp_path).free
    floats = int(0.6 * room / 8 / (2 * 4 * 4)) * 8
    peer = peers.start(
        0,
        "--tls-dir",
        str(far / "crad-tls/0"),
        file=file,
        LIGHT_FLOATS=str(floats),
        LIGHT_CONTROL=str(far),
        https_proxy="x",
    )
    (far / "hold").write_text("0")
    peer.says(r"WARNING https_proxy is set, and peers do not use proxies; .* direct TCP route to peer 1")
    peer.says(r"WARNING .* free for .*state-0, and two rounds take")
    assert peer.process.poll() is None


# --- what it looks like -----------------------------------------------------------------------------------------------

LONG = warning(
    "certificate", "a sentence that is longer than what fits beside the first two columns of a terminal", "go"
)


def test_on_a_terminal_lines_are_folded_beside_the_first_columns() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
    show(console, LONG)
    output = console.file.getvalue()  # type: ignore[attr-defined]
    first, second = [line.rstrip() for line in output.splitlines()]
    assert first.startswith("warning  certificate  a sentence")
    assert second.startswith(" " * 22)
    assert second[22] != " "
    assert max(len(first), len(second)) <= 80


def test_for_programs_a_finding_is_one_line_and_its_text_no_markup() -> None:
    console = Console(file=io.StringIO(), width=80)
    show(console, LONG)
    show(console, ok("peer 1", "[bold]not mine[/bold]"))
    assert console.file.getvalue().splitlines() == [  # type: ignore[attr-defined]
        f"warning  certificate  {LONG.text}; go",
        "ok       peer 1       [bold]not mine[/bold]",
    ]


def test_verdicts() -> None:
    fine, doubtful, bad = ok("a", ""), warning("b", ""), failure("c", ExitCode.DATA, "")
    assert verdict([fine], 3, None).startswith("All is well: peer 3 can be started")
    assert verdict([fine], 3, "17") == "All is well: peer 3 is running."
    assert (
        verdict([doubtful, bad, bad], 3, None) == "2 failures and 1 warning: mend what failed, and check peer 3 again."
    )
