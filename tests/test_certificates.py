"""What a peer accepts as its own certificate and as another's."""

from __future__ import annotations

import errno
import hashlib
import ipaddress
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ed25519, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID
from forging import DAY, NOW, forge, forge_authority, genuine_authority, names_of, p384, uri, usage
from hypothesis import given, settings
from hypothesis import strategies as st

from crad_p2p.errors import CertificateError, ExitCode
from launch.authority import (
    Authority,
    key_to_pem,
    make_request,
    new_authority,
    new_key,
    sign_request,
    to_pem,
)
from peer.certificates import (
    certificate_from_der,
    check_authority,
    check_issued,
    days_left,
    fingerprint,
    host_name,
    identity_in,
    identity_of,
    identity_uri,
    sign,
    verify,
)
from peer.credentials import Credentials, expiry_warning, load_credentials, load_files

CA = new_authority("colon", NOW - DAY)
KEY = new_key()
LEAF = sign_request(CA, make_request(KEY, "colon", 1), 1, now=NOW - DAY)
RSA = rsa.generate_private_key(65537, 2048)
ED25519 = ed25519.Ed25519PrivateKey.generate()
DER = serialization.Encoding.DER


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The TLS directory of peer 1 of colon."""
    folder = tmp_path / "tls"
    folder.mkdir()
    fill(folder)
    return folder


def fill(folder: Path, leaf: x509.Certificate = LEAF, key: Any = KEY, authority: Authority = CA) -> None:
    (folder / "ca.pem").write_bytes(to_pem(authority.certificate))
    (folder / "peer.pem").write_bytes(to_pem(leaf))
    (folder / "peer.key").write_bytes(key_to_pem(key))
    for name, mode in (("ca.pem", 0o644), ("peer.pem", 0o644), ("peer.key", 0o600)):
        (folder / name).chmod(mode)


def load(folder: Path, now: datetime = NOW) -> Credentials:
    return load_credentials(folder, "colon", 1, now)


def refused(folder: Path, *words: str, now: datetime = NOW, federation: str = "colon", peer: int = 1) -> str:
    """It is refused, in one sentence that has these words."""
    with pytest.raises(CertificateError) as caught:
        load_credentials(folder, federation, peer, now)
    text = str(caught.value)
    assert caught.value.exit_code == ExitCode.CERTIFICATE
    assert "\n" not in text
    assert text.startswith(f"{folder}")
    for word in words:
        assert word in text, text
    return text


# --- a peer's own files -----------------------------------------------------------------------------------------------


def test_files_that_fit(folder: Path) -> None:
    found = load(folder)
    assert (found.folder, found.federation, found.peer) == (folder, "colon", 1)
    assert found.certificate == LEAF
    assert found.authorities == (CA.certificate,)
    assert found.issuer == CA.certificate
    assert found.not_after == LEAF.not_valid_after_utc
    assert found.key_pem == (folder / "peer.key").read_bytes()
    assert found == load(folder)
    assert found != replace(found, ca_pem=b"")


def test_the_key_is_not_shown(folder: Path) -> None:
    found = load(folder)
    assert "PRIVATE" not in f"{found!r} {found}"
    assert found.key_pem.split()[3].decode() not in repr(found)


def test_no_directory(tmp_path: Path) -> None:
    refused(tmp_path / "none", "is not there", "expected a directory", "crad-mesh certs request --id 1")
    (tmp_path / "file").write_text("")
    refused(tmp_path / "file", "is not a directory", "expected a directory")


def test_a_directory_that_this_user_may_not_look_into(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(path: Path) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", forbidden)  # since the tests' user may be root, who may
    refused(folder, f"{folder}: cannot be looked into (Permission denied)", "owner or mode")


@pytest.mark.parametrize("name", ["ca.pem", "peer.pem", "peer.key"])
def test_files_that_cannot_be_read(folder: Path, name: str) -> None:
    path = folder / name
    path.unlink()
    refused(folder, f"{path}: is not there; expected", "crad-mesh certs")
    path.symlink_to(name)
    refused(folder, f"{path}: cannot be read (Too many levels of symbolic links)", "this user")
    path.unlink()
    os.mkfifo(path)
    refused(folder, f"{path}: is not a plain file")
    path.unlink()
    path.mkdir()
    refused(folder, f"{path}: is a directory")


@pytest.mark.parametrize("name", ["ca.pem", "peer.pem", "peer.key"])
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"hello", "holds no PEM block"),
        (LEAF.public_bytes(DER), "holds no PEM block"),
        (to_pem(make_request(KEY, "colon", 1)), "holds a request"),
        (b"-----BEGIN SECRET-----\nAAAA\n-----END SECRET-----\n", "holds a PEM block 'SECRET'"),
        (b"x" * (1024 * 1024 + 1), "has more than 1048576 bytes"),
    ],
    ids=["empty", "blank", "text", "der", "request", "other", "huge"],
)
def test_files_with_something_else(folder: Path, name: str, content: bytes, words: str) -> None:
    (folder / name).write_bytes(content)
    refused(folder, f"{folder / name}: {words}", "expected", "crad-mesh certs")


@pytest.mark.parametrize("name", ["ca.pem", "peer.pem", "peer.key"])
def test_files_that_are_cut_off(folder: Path, name: str) -> None:
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: len(content) // 2])
    refused(folder, f"{folder / name}: holds a", "that is cut off", "expected")


def test_the_answer_to_a_request_is_missing(folder: Path) -> None:
    (folder / "peer.pem").unlink()
    (folder / "peer.csr").write_bytes(to_pem(make_request(KEY, "colon", 1)))
    refused(folder, "peer.pem: is not there", f"have {folder / 'peer.csr'} signed", "crad-mesh certs install")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o660, 0o666, 0o610])
def test_a_key_that_others_can_reach(folder: Path, mode: int) -> None:
    (folder / "peer.key").chmod(mode)
    refused(folder, f"peer.key: has mode {mode:04o}", "expected 0600", "chmod 600", "renew")


@pytest.mark.parametrize("name", ["ca.pem", "peer.pem"])
@pytest.mark.parametrize("mode", [0o664, 0o646, 0o666, 0o620, 0o602, 0o1777])
def test_certificates_that_others_can_write(folder: Path, name: str, mode: int) -> None:
    (folder / name).chmod(mode)
    refused(folder, f"{folder / name}: has mode {mode:04o}", "others can write it", f"'chmod 644 {folder / name}'")


@pytest.mark.parametrize("name", ["ca.pem", "peer.pem"])
@pytest.mark.parametrize("mode", [0o644, 0o600, 0o400, 0o444, 0o755])
def test_certificates_that_others_can_read(folder: Path, name: str, mode: int) -> None:
    (folder / name).chmod(mode)
    assert load(folder).peer == 1


def test_files_on_their_way_to_a_peer_may_have_any_mode(folder: Path) -> None:
    """They come by mail, and are written anew where they are used."""
    for name in ("ca.pem", "peer.pem"):
        (folder / name).chmod(0o666)
    assert load_files(folder / "ca.pem", folder / "peer.pem", folder / "peer.key", "colon", 1, NOW).peer == 1


def test_a_key_of_somebody_else(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 54321)
    refused(folder, "peer.key: is owned by", f"and this runs as {uid + 54321} so that", "chown")


def test_a_key_of_somebody_else_for_root(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:
        os.chown(folder / "peer.key", 54321, -1)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    refused(folder, "peer.key: is owned by", "this runs as root, who can read it all the same", "chown root")


def test_a_key_behind_a_link_is_judged_by_what_it_leads_to(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "elsewhere.key"
    (folder / "peer.key").rename(target)
    (folder / "peer.key").symlink_to(target)
    assert load(folder).peer == 1
    target.chmod(0o644)
    refused(folder, "peer.key: has mode 0644")


def test_keys_of_other_kinds(folder: Path) -> None:
    for key, words in ((p384(), "a key of the curve secp384r1"), (RSA, "(RSA)"), (ED25519, "(Ed25519)")):
        (folder / "peer.key").write_bytes(key_to_pem(key))
        refused(folder, "peer.key: holds a key of", words, "expected one of the curve P-256")


def test_an_encrypted_key(folder: Path) -> None:
    secret = KEY.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )
    (folder / "peer.key").write_bytes(secret)
    refused(folder, "peer.key: is encrypted", "without a password", "openssl pkcs8")


def test_a_certificate_where_the_key_should_be(folder: Path) -> None:
    (folder / "peer.key").write_bytes(to_pem(LEAF))
    refused(folder, "peer.key: holds a certificate", "expected a private key")


@pytest.mark.parametrize("name", ["ca.pem", "peer.pem"])
def test_a_key_where_everybody_may_read_it(folder: Path, name: str) -> None:
    with (folder / name).open("ab") as file:
        file.write(key_to_pem(KEY))
    refused(folder, f"{folder / name}: holds a private key", "take the key out", "renew")


def test_the_certificate_of_the_ca_instead_of_the_peers(folder: Path) -> None:
    (folder / "peer.pem").write_bytes(to_pem(CA.certificate))
    refused(folder, "peer.pem: is the certificate of a CA; expected the certificate of a peer")


def test_two_certificates_instead_of_one(folder: Path) -> None:
    (folder / "peer.pem").write_bytes(to_pem(LEAF) + to_pem(CA.certificate))
    refused(folder, "peer.pem: holds 2 certificates; expected that of the peer alone")


def test_the_key_to_another_certificate(folder: Path) -> None:
    (folder / "peer.key").write_bytes(key_to_pem(new_key()))
    refused(folder, f"peer.pem: does not belong to the key in {folder / 'peer.key'}", "crad-mesh certs install")


def test_another_identity(folder: Path) -> None:
    refused(folder, "is for peer 1 of federation 'colon'; expected peer 2", peer=2)
    refused(folder, "is for peer 1 of federation 'colon'; expected federation 'skin'", federation="skin")


def test_an_identity_of_no_form(folder: Path) -> None:
    fill(folder, forge(CA, KEY, names=None))
    refused(folder, "peer.pem: names no URI; expected exactly one", "renew")


def test_dates(folder: Path) -> None:
    assert load(folder, NOW + 363 * DAY).peer == 1
    refused(
        folder,
        "peer.pem: expired on 2031-04-30 12:00 UTC, and it is 2031-05-01 12:00 UTC",
        "crad-mesh certs renew",
        now=NOW + 365 * DAY,
    )
    refused(
        folder,
        "peer.pem: is not valid before 2030-04-29 12:00 UTC",
        "it is 2030-04-28 12:00 UTC",
        "set the clock right",
        now=NOW - 3 * DAY,
    )


def test_another_ca_of_the_same_name(folder: Path) -> None:
    (folder / "ca.pem").write_bytes(to_pem(genuine_authority().certificate))
    refused(folder, "peer.pem: is not issued by a CA that is trusted here", "put the right CA certificate into")


def test_a_ca_of_the_same_subject_with_another_key(folder: Path) -> None:
    fake = genuine_authority()
    fill(folder, forge(Authority(CA.certificate, fake.key), KEY))
    refused(folder, "names the CA ", "CN=colon (", "does not have its signature: it is damaged or forged")


def test_a_ca_that_has_expired(folder: Path) -> None:
    authority = genuine_authority(end=NOW - DAY / 2)
    fill(folder, forge(authority, KEY), authority=authority)
    refused(folder, "ca.pem: expired on 2030-05-01 00:00 UTC", "crad-mesh certs init-ca")


@pytest.mark.parametrize(
    ("constraints", "key_usage", "key", "words"),
    [
        (None, usage("key_cert_sign"), None, "is not the certificate of a CA (basic constraints)"),
        (x509.BasicConstraints(False, None), usage("key_cert_sign"), None, "(basic constraints)"),
        (x509.BasicConstraints(True, 0), None, None, "(key usage keyCertSign)"),
        (x509.BasicConstraints(True, 0), usage("digital_signature"), None, "(key usage keyCertSign)"),
        (x509.BasicConstraints(True, 0), usage("key_cert_sign"), RSA, "(RSA); expected one of a curve"),
    ],
    ids=["none", "leaf", "no usage", "usage", "rsa"],
)
def test_a_ca_that_is_none(folder: Path, constraints: Any, key_usage: Any, key: Any, words: str) -> None:
    authority = forge_authority(constraints=constraints, key_usage=key_usage, key=key)
    fill(folder, forge(authority, KEY), authority=authority)
    refused(folder, "ca.pem: holds a certificate, ", words, "--ca")
    with pytest.raises(ValueError, match=r"is signed by|is not issued"):
        check_issued(forge(authority, KEY), [authority.certificate], NOW)


def test_a_peers_certificate_among_the_cas(folder: Path) -> None:
    (folder / "ca.pem").write_bytes(to_pem(CA.certificate) + to_pem(LEAF))
    refused(folder, "ca.pem: holds a certificate, ", "is not the certificate of a CA")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"extended": None}, "has no extended key usage serverAuth and clientAuth"),
        ({"extended": [ExtendedKeyUsageOID.SERVER_AUTH]}, "has no extended key usage clientAuth"),
        ({"extended": [ExtendedKeyUsageOID.CLIENT_AUTH]}, "has no extended key usage serverAuth"),
        (
            {"extended": [ExtendedKeyUsageOID.ANY_EXTENDED_KEY_USAGE]},
            "has no extended key usage serverAuth and clientAuth",
        ),
        ({"key_usage": usage("key_agreement")}, "is not for signatures"),
        ({"algorithm": hashes.SHA224()}, "is signed by the algorithm ecdsa-with-SHA224; expected ECDSA with SHA-256"),
        (
            {"extra": [(x509.UnrecognizedExtension(x509.ObjectIdentifier("1.2.3.4"), b"\x05\x00"), True)]},
            "has a critical extension, 1.2.3.4, that is not understood",
        ),
        ({"names": [*names_of("colon", 1), x509.DNSName("localhost")]}, "names 2 DNS names"),
    ],
    ids=["no eku", "server", "client", "any", "usage", "sha224", "critical", "name"],
)
def test_a_certificate_for_something_else(folder: Path, changes: dict[str, Any], words: str) -> None:
    fill(folder, forge(CA, KEY, **changes))
    refused(folder, f"{folder / 'peer.pem'}: {words}", "crad-mesh certs renew")


def test_sha1(folder: Path) -> None:
    """``cryptography`` signs with no such hash any more, so its number is put into a certificate that was made."""
    sha256, sha1 = bytes.fromhex("300a06082a8648ce3d040302"), bytes.fromhex("300906072a8648ce3d0401")
    der = LEAF.public_bytes(DER)
    assert der[:2] == der[4:6] == b"\x30\x82"  # the whole, and what is signed, with two bytes of length each
    assert der.count(sha256) == 2
    lengths = [int.from_bytes(der[2:4]) - 2, int.from_bytes(der[6:8]) - 1]
    der = b"".join(b"\x30\x82" + length.to_bytes(2) for length in lengths) + der[8:].replace(sha256, sha1)
    fill(folder, x509.load_der_x509_certificate(der))
    refused(folder, "peer.pem: is signed by the algorithm ecdsa-with-SHA1; expected ECDSA with SHA-256")


def test_a_bundle_while_the_ca_is_replaced(folder: Path) -> None:
    new = new_authority("colon", NOW)
    both = to_pem(new.certificate) + to_pem(CA.certificate)
    (folder / "ca.pem").write_bytes(both)
    assert load(folder).issuer == CA.certificate
    renewed = sign_request(new, make_request(KEY, "colon", 1), 1, now=NOW)
    fill(folder, renewed, authority=new)
    assert load(folder).issuer == new.certificate
    (folder / "ca.pem").write_bytes(both)
    assert load(folder).issuer == new.certificate
    (folder / "ca.pem").write_bytes(to_pem(CA.certificate))
    refused(folder, "is not issued by a CA that is trusted here")


def test_an_expired_ca_may_stay_in_the_bundle(folder: Path) -> None:
    old = genuine_authority(end=NOW - DAY / 2)
    (folder / "ca.pem").write_bytes(to_pem(old.certificate) + to_pem(CA.certificate))
    assert load(folder).issuer == CA.certificate


def test_warning_before_the_end(folder: Path) -> None:
    found = load(folder)
    assert days_left(found.certificate, NOW) == 364
    assert expiry_warning(found, NOW + 333 * DAY) is None
    warning = expiry_warning(found, NOW + 335 * DAY)
    assert warning
    assert "peer.pem: expires on 2031-04-30 12:00 UTC, in 29 days" in warning
    assert f"crad-mesh certs renew --tls-dir {folder}" in warning
    assert "in 1 day;" in (expiry_warning(found, NOW + 363 * DAY) or "")
    assert "in less than a day" in (expiry_warning(found, NOW + 363.5 * DAY) or "")


def test_warning_for_the_ca(folder: Path) -> None:
    authority = genuine_authority(end=NOW + 200 * DAY, start=NOW - 1000 * DAY)
    fill(folder, forge(authority, KEY, end=NOW + 400 * DAY), authority=authority)
    assert expiry_warning(load(folder), NOW) is None
    warning = expiry_warning(load(folder), NOW + 180 * DAY)
    assert warning
    assert "ca.pem: the CA's certificate expires on" in warning
    assert "in 20 days" in warning
    assert "init-ca" in warning


def test_a_new_certificate_for_a_month_is_not_warned_of(folder: Path) -> None:
    fill(folder, sign_request(CA, make_request(KEY, "colon", 1), 1, days=30, now=NOW))
    assert expiry_warning(load(folder), NOW) is None
    assert expiry_warning(load(folder), NOW + 21 * DAY)


# --- identity ---------------------------------------------------------------------------------------------------------


def test_names_of_a_peer() -> None:
    assert identity_uri("colon", 3) == "spiffe://colon/peer/3"
    assert host_name("colon", 3) == "peer-3.colon.crad.internal"
    assert identity_of(LEAF, "colon") == 1
    longest = "a" * 63
    leaf = sign_request(new_authority(longest, NOW), make_request(KEY, longest, 65535), 65535, now=NOW)
    assert identity_in(leaf) == (longest, 65535)


DNS_1 = x509.DNSName("peer-1.colon.crad.internal")


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ([DNS_1], "names no URI"),
        ([uri("spiffe://colon/peer/1"), uri("spiffe://colon/peer/1"), DNS_1], "names 2 URIs"),
        ([uri("spiffe://colon/peer/1"), uri("https://a.org"), DNS_1], "names 2 URIs"),
        ([uri("spiffe://colon/peer/01"), DNS_1], "expected spiffe://colon/peer/1"),
        ([uri("spiffe://colon/peer/65536"), DNS_1], "of the form spiffe://FEDERATION/peer/ID"),
        ([uri("spiffe://colon/peer/-1"), DNS_1], "of the form"),
        ([uri("spiffe://colon/peer/"), DNS_1], "of the form"),
        ([uri("spiffe://colon/peer/1/"), DNS_1], "of the form"),
        ([uri("spiffe://colon/peer/1?x"), DNS_1], "of the form"),
        ([uri("spiffe://colon/peer/1\n"), DNS_1], "of the form"),
        ([uri("spiffe://colon:80/peer/1"), DNS_1], "of the form"),
        ([uri("spiffe://x@colon/peer/1"), DNS_1], "of the form"),
        ([uri("spiffe://Colon/peer/1"), DNS_1], "of the form"),
        ([uri("SPIFFE://colon/peer/1"), DNS_1], "of the form"),
        ([uri("spiffe://colon/ns/1"), DNS_1], "of the form"),
        ([uri("spiffe://colon/peer/1")], "names no DNS name"),
        ([uri("spiffe://colon/peer/1"), x509.DNSName("localhost")], "names the DNS name localhost; expected exactly"),
        ([uri("spiffe://colon/peer/1"), x509.DNSName("peer-2.colon.crad.internal")], "peer-1.colon.crad.internal"),
        ([uri("spiffe://colon/peer/1"), x509.DNSName("*.colon.crad.internal")], "peer-1.colon.crad.internal"),
        ([uri("spiffe://colon/peer/1"), DNS_1, DNS_1], "names 2 DNS names"),
        ([*names_of("colon", 1), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))], "other kinds (IPAddress)"),
        ([*names_of("colon", 1), x509.RFC822Name("a@b.org")], "other kinds (RFC822Name)"),
        ([*names_of("colon", 1), x509.DirectoryName(x509.Name([]))], "other kinds (DirectoryName)"),
        (names_of("skin", 1), "is for peer 1 of federation 'skin'; expected federation 'colon'"),
    ],
)
def test_names_that_are_refused(names: list[x509.GeneralName], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        identity_of(forge(CA, names=names), "colon")


# --- another peer's ---------------------------------------------------------------------------------------------------


def test_issued() -> None:
    check_issued(LEAF, [CA.certificate], NOW)
    check_issued(LEAF, [genuine_authority().certificate, CA.certificate], NOW)
    with pytest.raises(ValueError, match=r"^is not issued by a CA .*; trusted none\)"):
        check_issued(LEAF, [], NOW)
    with pytest.raises(ValueError, match="is not issued by a CA"):
        check_issued(LEAF, [LEAF], NOW)
    with pytest.raises(ValueError, match="is the certificate of a CA"):
        check_issued(CA.certificate, [CA.certificate], NOW)


def test_dates_are_looked_at_when_there_is_a_moment() -> None:
    late = NOW + 5000 * DAY
    with pytest.raises(ValueError, match=r"^expired on"):
        check_issued(LEAF, [CA.certificate], late)
    check_issued(LEAF, [CA.certificate], None)
    authority = genuine_authority(end=NOW + DAY)
    with pytest.raises(ValueError, match=r"is issued by a CA, .*, that expired on"):
        check_issued(forge(authority), [authority.certificate], NOW + 2 * DAY)
    check_issued(forge(authority), [authority.certificate], None)


def test_of_two_certificates_of_one_ca_the_longer_counts() -> None:
    authority = genuine_authority(end=NOW - DAY / 2)
    longer = genuine_authority(like=authority)
    check_issued(forge(authority), [authority.certificate, longer.certificate], NOW)
    check_issued(forge(authority), [longer.certificate, authority.certificate], NOW)


@pytest.mark.parametrize("key", [RSA, ED25519, p384()], ids=["rsa", "ed25519", "p384"])
def test_keys_of_other_kinds_in_anothers_certificate(key: Any) -> None:
    certificate = certificate_from_der(forge(CA, key).public_bytes(DER))
    assert identity_of(certificate, "colon") == 1
    with pytest.raises(ValueError, match=r"has a key of .*; expected one of the curve P-256"):
        check_issued(certificate, [CA.certificate], NOW)
    with pytest.raises(ValueError, match=r"has a key of .*; expected one of the curve P-256"):
        verify(certificate, b"test", b"payload", b"signature")


def test_a_certificate_on_the_wire() -> None:
    der = LEAF.public_bytes(DER)
    assert certificate_from_der(der) == LEAF
    assert len(der) < 1024
    for content in (b"", der[:-1], der + b"\0", to_pem(LEAF)):
        with pytest.raises(ValueError, match=r"^is not an X.509 certificate"):
            certificate_from_der(content)
    with pytest.raises(ValueError, match=r"^has 8193 bytes; expected at most 8192"):
        certificate_from_der(b"x" * 8193)


def test_an_extension_that_is_there_twice() -> None:
    """Made by changing the number of another extension, since no builder makes it."""
    issuer_names = x509.UnrecognizedExtension(x509.ObjectIdentifier("2.5.29.18"), b"\x30\x00")
    der = forge(CA, KEY, extra=[(issuer_names, False)]).public_bytes(DER)
    twice = der.replace(bytes.fromhex("0603551d12"), bytes.fromhex("0603551d11"))
    assert twice != der
    with pytest.raises(ValueError, match=r"Duplicate"):
        certificate_from_der(twice)
    lazy = x509.load_der_x509_certificate(twice)
    for check in CHECKS:
        with pytest.raises(ValueError, match=r"Duplicate|does not fit"):
            check(lazy)


CHECKS: list[Callable[[x509.Certificate], Any]] = [
    lambda certificate: identity_of(certificate, "colon"),
    lambda certificate: check_issued(certificate, [CA.certificate, certificate], NOW),
    lambda certificate: check_authority(certificate),
    lambda certificate: verify(certificate, b"test", b"payload", b"signature"),
]


@st.composite
def nearly(draw: st.DrawFn) -> bytes:
    """A certificate with a few bytes changed, left out or added."""
    der = bytearray(LEAF.public_bytes(DER))
    for _ in range(draw(st.integers(1, 3))):
        place, kind = draw(st.integers(0, len(der) - 1)), draw(st.sampled_from(["change", "drop", "add"]))
        if kind == "change":
            der[place] = draw(st.integers(0, 255))
        elif kind == "drop":
            del der[place]
        else:
            der.insert(place, draw(st.integers(0, 255)))
    return bytes(der)


@settings(max_examples=400, deadline=None, derandomize=True, database=None)
@given(nearly() | st.binary(max_size=64))
def test_hostile_bytes_are_a_value_error(der: bytes) -> None:
    for parse in (certificate_from_der, x509.load_der_x509_certificate):  # the second one leaves errors for later
        with suppress(ValueError):
            certificate = parse(der)
            for check in CHECKS:
                with suppress(ValueError):
                    check(certificate)


# --- signatures -------------------------------------------------------------------------------------------------------


def test_signatures() -> None:
    signature = sign(KEY, b"manifest", b"payload")
    verify(LEAF, b"manifest", b"payload", signature)
    wrong = [
        (LEAF, b"manifest", b"payloae", signature),
        (LEAF, b"other", b"payload", signature),
        (LEAF, b"manifest", b"payload", signature[:-1]),
        (LEAF, b"manifest", b"payload", b""),
        (forge(CA), b"manifest", b"payload", signature),
    ]
    for each in wrong:
        with pytest.raises(ValueError, match="does not fit the signature"):
            verify(*each)


def test_a_purpose_cannot_run_into_the_payload() -> None:
    signature = sign(KEY, b"a", b"b\0c")
    with pytest.raises(ValueError, match="holds a NUL"):
        verify(LEAF, b"a\0b", b"c", signature)
    with pytest.raises(ValueError, match="holds a NUL"):
        sign(KEY, b"a\0b", b"c")


def test_fingerprint() -> None:
    assert re.fullmatch("([0-9A-F]{2}:){31}[0-9A-F]{2}", fingerprint(LEAF))
    assert fingerprint(LEAF).replace(":", "").lower() == hashlib.sha256(LEAF.public_bytes(DER)).hexdigest()


def test_reading_certificates_loads_neither_torch_nor_grpc() -> None:
    probe = "import sys, peer.credentials; sys.exit(any(name in sys.modules for name in ('torch', 'grpc', 'launch')))"
    assert subprocess.run([sys.executable, "-c", probe], timeout=60).returncode == 0
