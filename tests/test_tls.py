"""Mutual TLS between real peers: who is refused, what is said, and certificates that are renewed while all runs."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from processes import COMMAND, Peer, Peers, doctored, federation_file, free_port, until

from crad_p2p.durable import write_file
from crad_p2p.errors import ExitCode
from crad_p2p.federation import load_federation
from crad_p2p.manifest import Manifest
from launch.authority import (
    Authority,
    key_to_pem,
    make_request,
    new_authority,
    new_key,
    sign_request,
    throwaway,
    to_pem,
)
from peer.certificates import fingerprint_start
from peer.gate import Gate
from peer.quiet import Quiet
from peer.refusals import Refusals
from peer.tls import CallerError, Tls

#: For new certificate files.
LOOKS_OFTEN = doctored("import peer.tls, peer.cli; peer.tls._LOOK = 0.3; peer.cli.main()")


def give(folder: Path, authority: Authority, federation: str, peer: int, **options: Any) -> None:
    """Put a certificate of this CA in a TLS directory."""
    key = new_key()
    certificate = sign_request(authority, make_request(key, federation, peer), peer, **options)
    folder.mkdir(parents=True, exist_ok=True)
    write_file(folder / "peer.key", key_to_pem(key), 0o600)
    write_file(folder / "peer.pem", to_pem(certificate))
    write_file(folder / "ca.pem", to_pem(authority.certificate))


def serial_in(folder: Path) -> int:
    return x509.load_pem_x509_certificate((folder / "peer.pem").read_bytes()).serial_number


def signer_of(manifest: Manifest) -> int:
    """Serial number of the certificate that signed it."""
    from base64 import b64decode

    assert manifest.signature is not None
    return x509.load_der_x509_certificate(b64decode(manifest.signature.certificate)).serial_number


# --- at the start -----------------------------------------------------------------------------------------------------


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def expired(folder: Path) -> None:
    give(folder, new_authority("one"), "one", 0, days=10, now=datetime.now(UTC) - timedelta(days=20))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (
            shutil.rmtree,
            r"crad-tls/0: is not there \(it is looked for at /.*/crad-tls/0\).*--tls-dir.*crad-mesh certs req",
        ),
        (remove("ca.pem"), r"crad-tls/0/ca\.pem: is not there.*crad-mesh certs"),
        (remove("peer.pem"), r"crad-tls/0/peer\.pem: is not there"),
        (remove("peer.key"), r"crad-tls/0/peer\.key: is not there"),
        (lambda folder: (folder / "peer.key").chmod(0o644), r"peer\.key: has mode 0644.*expected 0600.*chmod 600"),
        (expired, r"peer\.pem: expired on .* UTC, and it is .* UTC.*crad-mesh certs renew"),
        (lambda folder: give(folder, new_authority("one"), "one", 7), r"peer\.pem: .*peer 7.*peer 0"),
        (lambda folder: give(folder, new_authority("two"), "two", 0), r"peer\.pem: .*federation 'two'.*'one'"),
        (
            lambda folder: write_file(folder / "ca.pem", to_pem(new_authority("one").certificate)),
            r"peer\.pem: is not issued by a CA that is trusted here",
        ),
        (
            lambda folder: write_file(folder / "ca.pem", (folder / "ca.pem").read_text().encode("utf-16")),
            r"ca\.pem: holds a text in UTF-16, not in ASCII; expected one or more CA certificates in PEM",
        ),
    ],
    ids=[
        "no folder",
        "no CA",
        "no certificate",
        "no key",
        "readable",
        "expired",
        "other id",
        "other run",
        "foreign",
        "UTF-16",
    ],
)
def test_what_is_wrong_with_the_files_is_said_before_anything_else(
    tmp_path: Path, spoil: Callable[[Path], None], said: str
) -> None:
    file = federation_file(tmp_path)
    spoil(tmp_path / "crad-tls/0")
    start = time.monotonic()
    peer = Peer(tmp_path, "--id", "0", "--peers", str(file), state=tmp_path / "state")
    try:
        assert peer.ended(20) == ExitCode.CERTIFICATE, peer.output
        assert time.monotonic() - start < 5
        assert re.fullmatch(f"crad-peer: .*{said}.*\n", peer.output), peer.output
    finally:
        peer.end()


def test_plain_text_is_for_this_machine_alone(tmp_path: Path) -> None:
    there = [{"id": i, "address": f"{host}:{free_port()}"} for i, host in enumerate(("127.0.0.1", "192.0.2.1"))]
    file = federation_file(tmp_path, peers=there)
    peer = Peer(tmp_path, "--id", "0", "--peers", str(file), "--insecure", state=tmp_path / "state")
    try:
        assert peer.ended(20) == ExitCode.CERTIFICATE
        assert "--insecure sends everything as plain text" in peer.last_words()
        assert "peer 1 has the address 192.0.2.1:" in peer.last_words()
    finally:
        peer.end()


# --- while all runs ---------------------------------------------------------------------------------------------------


def test_a_peer_whose_certificate_is_another_ones_is_refused_and_named(mesh: Callable[..., Peers]) -> None:
    """Peer 2 answers where peer 1 is expected."""
    peers = mesh(3, rounds=3)
    crossed = peers.write_file(peers.folder / "crossed", {1: peers.ports[2], 2: peers.ports[1]})
    zero, two = peers.start(0, file=crossed), peers.start(2)
    zero.says(
        rf"peer 1 at 127\.0\.0\.1:{peers.ports[2]}: the certificate there is that of peer 2, expected that of peer 1"
    )
    assert not zero.times_connected(1)
    assert zero.process.poll() is None
    assert two.process.poll() is None


def test_plain_text_and_tls_do_not_mix(mesh: Callable[..., Peers]) -> None:
    peers = mesh(2, rounds=3)
    zero, one = peers.start(0), peers.start(1, "--insecure")
    zero.says(r"peer 1 at .*: no TLS 1\.3 handshake comes about")
    one.says(r"WARNING --insecure: this peer speaks plain text")
    one.says(
        r"WARNING peer 0 at .*: the other end closes plain text: it probably expects TLS; start .* without --insec"
    )
    assert not zero.times_connected(1)
    assert not one.times_connected(0)


def test_renewed_certificates_are_picked_up_without_a_stop(mesh: Callable[..., Peers]) -> None:
    """First everybody trusts a second CA, too; then all have certificates of it; then nobody trusts the first."""
    peers = mesh(2, rounds=9)
    peers.tell("hold", 3)
    running = [peers.start(i, command=LOOKS_OFTEN) for i in range(2)]
    peers.go_to(2, running)
    federation, folders = "one", [peers.folder / f"crad-tls/{i}" for i in range(2)]
    old = (folders[0] / "ca.pem").read_bytes()
    new = new_authority(federation)
    for folder in folders:
        write_file(folder / "ca.pem", old + to_pem(new.certificate))
    for each in running:
        each.says("new certificate files are in use")
    for i, folder in enumerate(folders):
        give(folder, new, federation, i)
        write_file(folder / "ca.pem", old + to_pem(new.certificate))
    for each in running:
        until(lambda each=each: each.output.count("new certificate files are in use") == 2, each.output, 30)
    start = fingerprint_start(new.certificate)
    for i, each in enumerate(running):  # so that one knows when the old CA can go
        each.says(
            rf"INFO    peer {1 - i} comes with another certificate than before: of the CA {start}, valid until \d"
        )
        assert "than before" not in each.output[: each.output.index("new certificate files are in use")]
    peers.go_to(4, running)
    for each, folder in zip(running, folders, strict=True):
        assert signer_of(each.manifest(4)) == serial_in(folder)
        write_file(folder / "ca.pem", to_pem(new.certificate))
    for each in running:
        until(lambda each=each: each.output.count("new certificate files are in use") == 3, each.output, 30)
    peers.tell("hold", None)
    for each in running:
        assert each.ended() == 0, each.output
        assert "Traceback" not in each.output


def test_files_that_are_half_written_leave_those_before_in_use(mesh: Callable[..., Peers]) -> None:
    peers = mesh(2, rounds=4)
    peers.tell("hold", 2)
    running = [peers.start(i, command=LOOKS_OFTEN) for i in range(2)]
    peers.go_to(1, running)
    path = peers.folder / "crad-tls/0/peer.pem"
    whole = path.read_bytes()
    path.write_bytes(whole[:100])
    running[0].says(r"new certificate files are not used, those before stay in use: .*peer\.pem")
    path.write_bytes(whole)
    peers.tell("hold", None)
    for each in running:
        assert each.ended() == 0, each.output


# --- what a member publishes ------------------------------------------------------------------------------------------

UNSIGNED = doctored(
    "import peer.publishing, peer.cli; peer.publishing.sign_manifest = lambda manifest, _: manifest; peer.cli.main()"
)
#: Signs with a key of its own making.
FORGED = doctored(
    """
import dataclasses, peer.publishing, peer.cli, launch.authority as a
real, key = peer.publishing.sign_manifest, a.new_key()
peer.publishing.sign_manifest = lambda m, own: real(m, dataclasses.replace(own, key=key))
peer.cli.main()
"""
)


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (UNSIGNED, r"manifest of round \d of peer 2 is not signed"),
        (FORGED, r"signature of the manifest of round \d of peer \d: does not fit the signature: .*"),
    ],
    ids=["unsigned", "forged"],
)
def test_a_manifest_that_its_peer_has_not_signed_is_not_used_and_the_others_go_on(
    mesh: Callable[..., Peers], command: tuple[str, ...], reason: str
) -> None:
    peers = mesh(3, rounds=3)
    good = [peers.start(0), peers.start(1)]
    bad = peers.start(2, command=command)
    for each in good:
        assert each.ended() == ExitCode.RESERVATIONS, each.output
        assert re.search(rf"WARNING round 1 of peer 2 is not used: {reason}", each.output), each.output
        assert "snapshots of peer 2 were refused" in each.last_words()
        assert [record.quarantined_teachers for record in each.history()] == [(2,)] * 3
        assert re.fullmatch(reason, each.history()[1].quarantine_reasons["2"])
        assert not list(each.state.glob("received/*/2.safetensors"))
    assert bad.ended() == ExitCode.RESERVATIONS, bad.output  # it is told
    assert re.search(rf"WARNING peer [01] does not use round \d of this peer: {reason}", bad.output)
    assert "peers 0, 1 do not use models of this peer" in bad.last_words()
    assert sorted(json.loads((bad.state / "refused-by.json").read_text())) == ["0", "1"]


def test_counts_that_change_in_the_run_are_refused(mesh: Callable[..., Peers]) -> None:
    peers = mesh(3, rounds=4)
    peers.tell("lie", 2, peer=2)
    running = peers.start_all()
    for each in running[:2]:
        assert each.ended() == ExitCode.RESERVATIONS, each.output
        reason = "manifest counts 999 validation samples of class 0, and an earlier one 1000; they must stay the same"
        assert reason in each.output
        assert [record.quarantined_teachers for record in each.history()] == [(), (), (2,), ()]
    assert running[2].ended() == ExitCode.RESERVATIONS


def test_another_class_list_is_told_with_both_names(mesh: Callable[..., Peers]) -> None:
    peers = mesh(2, rounds=2)
    zero, one = peers.start(0), peers.start(1, LIGHT_CLASSES="even,queer")
    for each, (here, there) in ((zero, ("odd", "queer")), (one, ("queer", "odd"))):
        assert each.ended() == ExitCode.PEERS_DISAGREE, each.output
        assert re.search(
            rf"the class list has '{there}' as class 1 on peer \d and '{here}' on peer \d; names and their order",
            each.last_words(),
        )


def test_the_default_place_of_the_files(mesh: Callable[..., Peers]) -> None:
    peers = mesh(2, rounds=1)
    shutil.move(peers.folder / "crad-tls/1", peers.folder / "elsewhere")
    zero, one = peers.start(0), peers.start(1, "--tls-dir", "elsewhere")
    assert (zero.ended(), one.ended()) == (0, 0), zero.output + one.output
    assert COMMAND.endswith("crad-peer")


def test_one_that_comes_back_with_other_data_ends_alone(mesh: Callable[..., Peers]) -> None:
    """All had agreed before round 1; a member that says something else later must not be able to end the others."""
    peers = mesh(3, rounds=6)
    running = peers.run_to(2)
    running[2].kill()
    odd = peers.start(2, LIGHT_CLASSES="even,queer")
    assert odd.ended() == ExitCode.DATA, odd.output
    assert "the data are not those with which this peer trained its rounds" in odd.last_words()
    assert '["even", "queer"] in the data set now' in odd.last_words()
    careless = "import peer.store, peer.cli; peer.store.Store.require_same_data = lambda *_: True; peer.cli.main()"
    odd = peers.start(2, command=doctored(careless), LIGHT_CLASSES="even,queer")
    for each in running[:2]:
        each.says(
            "WARNING peer 2 has other data than this peer: the class list has 'queer' as class 1 on peer 2 and 'odd'"
        )
    odd.kill()
    again = peers.start(2)
    peers.tell("hold", None)
    for each in (*running[:2], again):
        assert each.ended() == 0, each.output


def test_an_open_connection_ends_with_what_made_it_right(mesh: Callable[..., Peers]) -> None:
    """One peer drops the CA by which the other's certificate was issued."""
    peers = mesh(2, rounds=6)
    peers.tell("hold", 3)
    running = [peers.start(i, command=LOOKS_OFTEN) for i in range(2)]
    peers.go_to(2, running)
    zero, one = (peers.folder / f"crad-tls/{i}" for i in range(2))
    new = new_authority("one")
    write_file(one / "ca.pem", (one / "ca.pem").read_bytes() + to_pem(new.certificate))
    running[1].says("new certificate files are in use")
    give(zero, new, "one", 0)
    running[0].says("new certificate files are in use")
    running[0].says(r"peer 1 at .*: peer 0, this one, has new certificate files: connecting with them; trying again")
    running[1].says(r"peer 0 at .*: it ended the stream")
    running[0].says(r"peer 1 at .*: the certificate there is not issued by a CA that is trusted here")
    give(one, new, "one", 1)
    peers.tell("hold", None)
    for each in running:
        assert each.ended() == 0, each.output


def test_a_certificate_that_ends_while_its_peer_runs(mesh: Callable[..., Peers]) -> None:
    """The others let it go, and its own log says why; with a new one it goes on."""
    peers = mesh(2, rounds=6)
    authority = new_authority("one")
    zero, one = (peers.folder / f"crad-tls/{i}" for i in range(2))
    give(zero, authority, "one", 0)
    give(one, authority, "one", 1, days=1, now=datetime.now(UTC) - timedelta(days=1) + timedelta(seconds=11))
    peers.tell("hold", 3)
    running = [peers.start(i, command=LOOKS_OFTEN) for i in range(2)]
    peers.go_to(2, running)
    running[1].says(
        r"ERROR   the certificate of this peer expired on .*, and .* 'crad-mesh certs renew --tls-dir \S*crad-tls/1'"
    )
    running[0].says(r"peer 1 at .*: (its certificate has expired|the certificate there expired on)")
    running[0].says(
        r"WARNING (refused a call of somebody with a certificate of peer 1 at .*: certificate \(expired on .*\); if "
        r"that is its site, it must renew it|an unknown caller connected and made no call)"  # only TLS saw it
    )
    give(one, authority, "one", 1)
    peers.tell("hold", None)
    for each in running:
        assert each.ended() == 0, each.output


def test_whose_certificate_has_ended_is_said_but_not_believed(tmp_path: Path) -> None:
    authority = new_authority("one")
    give(tmp_path / "0", authority, "one", 0)
    give(tmp_path / "1", authority, "one", 1, days=10, now=datetime.now(UTC) - timedelta(days=20))
    give(tmp_path / "2", new_authority("one"), "one", 2)
    tls = Tls(tmp_path / "0", "one", 0)
    for number, claims in ((1, 1), (2, None)):
        pem = (tmp_path / f"{number}/peer.pem").read_bytes()
        with pytest.raises(CallerError) as raised:
            tls.caller({"ssl_tls_version": [b"TLSv1.3"], "x509_pem_cert": [pem]})
        assert raised.value.claims == claims


def test_a_caller_whose_certificate_has_ended_is_named_as_it_names_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority = new_authority("one")
    give(tmp_path / "0", authority, "one", 0)
    give(tmp_path / "1", authority, "one", 1, days=10, now=datetime.now(UTC) - timedelta(days=20))
    pem = (tmp_path / "1/peer.pem").read_bytes()

    class Context:
        """A call on a connection that was made when the certificate was good."""

        def peer(self) -> str:
            return "ipv4:10.0.0.7:41236"

        def auth_context(self) -> dict[str, list[bytes]]:
            return {"ssl_tls_version": [b"TLSv1.3"], "x509_pem_cert": [pem]}

        async def abort(self, code: grpc.StatusCode, _: str) -> None:
            raise PermissionError(code)

    refusals = Refusals()
    settings = load_federation(federation_file(tmp_path))
    gate = Gate(None, settings, Tls(tmp_path / "0", "one", 0), refusals)
    call: Any = gate.handlers["Hello"].stream_stream(None, Context())
    with pytest.raises(PermissionError, match="UNAUTHENTICATED"):
        asyncio.run(call)
    assert list(refusals.counts) == [("somebody with a certificate of peer 1", "certificate")]
    [line] = caplog.messages
    assert re.fullmatch(
        r"refused a call of somebody with a certificate of peer 1 at 10\.0\.0\.7:41236: certificate \(expired on .*\); "
        r"if that is its site, it must renew it \('crad-mesh certs renew' there\)",
        line,
    )


def test_the_end_of_the_own_certificate_is_said_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    authority = new_authority("one")
    end = datetime.now(UTC) + timedelta(seconds=2)  # a certificate has whole seconds
    give(tmp_path / "0", authority, "one", 0, days=1, now=end - timedelta(days=1))
    tls, now = Tls(tmp_path / "0", "one", 0), [0.0]
    quiet = Quiet(lambda: now[0])
    tls.say_end(quiet)
    assert not caplog.messages
    until(lambda: datetime.now(UTC) > end, "its end", 5)
    for at, lines in ((0, 1), (299, 1), (300, 2), (899, 2), (900, 3)):
        now[0] = at
        tls.say_end(quiet)
        assert len(caplog.messages) == lines
    assert f"'crad-mesh certs renew --tls-dir {tmp_path / '0'}'" in caplog.messages[0]


def test_who_comes_by_an_older_tls_is_no_caller(tmp_path: Path) -> None:
    throwaway(tmp_path, "one", [0, 1])
    tls = Tls(tmp_path / "0", "one", 0)
    pem = (tmp_path / "1/peer.pem").read_bytes()
    assert tls.caller({"ssl_tls_version": [b"TLSv1.3"], "x509_pem_cert": [pem]}).peer == 1
    for version in ([b"TLSv1.2"], [], [b""]):
        with pytest.raises(CallerError, match=r"TLS 1\.3 is needed"):
            tls.caller({"ssl_tls_version": version, "x509_pem_cert": [pem]})


def test_a_new_ca_at_once_and_the_run_goes_on(mesh: Callable[..., Peers]) -> None:
    """A key was stolen: all stop, and start with certificates of a CA that nobody has trusted before."""
    peers = mesh(3, rounds=5)
    running = peers.run_to(2)
    for each in running:
        assert each.stop() < 5
    new = new_authority("one")
    for i in range(3):
        give(peers.folder / f"crad-tls/{i}", new, "one", i)
    again = peers.start_all()
    peers.tell("hold", None)
    for each in again:
        assert each.ended() == 0, each.output
        assert "is signed again, with the certificate of now" in each.output
        assert [record.quarantined_teachers for record in each.history()] == [()] * 5
