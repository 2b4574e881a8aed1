"""Making CAs and certificates, and the throwaway ones of local meshes."""

from __future__ import annotations

import stat
import subprocess
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from forging import DAY, NOW, names_of, p384

import crad_p2p.durable
import launch.authority
from crad_p2p.durable import write_file
from crad_p2p.errors import CertificateError
from launch.authority import (
    key_to_pem,
    load_authority,
    load_request,
    make_request,
    new_authority,
    new_key,
    sign_request,
    throwaway,
    to_pem,
)
from peer.certificates import check_issued, identity_of
from peer.credentials import load_authorities, load_credentials

CA = new_authority("colon", NOW)
KEY = new_key()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# --- certificates -----------------------------------------------------------------------------------------------------


def test_a_ca() -> None:
    certificate = CA.certificate
    assert CA.federation == "colon"
    assert "PRIVATE" not in repr(CA)
    assert certificate.not_valid_after_utc == NOW + 3650 * DAY
    constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints)
    assert constraints.critical
    assert (constraints.value.ca, constraints.value.path_length) == (True, 0)
    usage = certificate.extensions.get_extension_for_class(x509.KeyUsage)
    assert usage.critical
    assert (usage.value.key_cert_sign, usage.value.crl_sign, usage.value.digital_signature) == (True, True, False)
    assert certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value == "colon"


def test_the_next_ca_of_a_federation_has_another_name() -> None:
    assert new_authority("colon", NOW).certificate.subject != CA.certificate.subject


def test_a_peers_certificate() -> None:
    certificate = sign_request(CA, make_request(KEY, "colon", 7), 7, now=NOW)
    check_issued(certificate, [CA.certificate], NOW)
    assert identity_of(certificate, "colon") == 7
    assert certificate.public_key() == KEY.public_key()
    assert certificate.not_valid_before_utc == NOW - DAY  # for clocks that are behind
    assert certificate.not_valid_after_utc == NOW + 365 * DAY
    extensions = certificate.extensions
    constraints = extensions.get_extension_for_class(x509.BasicConstraints)
    assert (constraints.critical, constraints.value.ca) == (True, False)
    usage = extensions.get_extension_for_class(x509.KeyUsage)
    assert (usage.critical, usage.value.digital_signature, usage.value.key_cert_sign) == (True, True, False)
    assert set(extensions.get_extension_for_class(x509.ExtendedKeyUsage).value) == {
        ExtendedKeyUsageOID.SERVER_AUTH,
        ExtendedKeyUsageOID.CLIENT_AUTH,
    }
    own = CA.certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    assert extensions.get_extension_for_class(x509.AuthorityKeyIdentifier).value.key_identifier == own.digest


def test_openssl_agrees(tmp_path: Path) -> None:
    try:
        subprocess.run(["openssl", "version"], check=True, capture_output=True)
    except OSError:
        pytest.skip("openssl is not installed")
    (tmp_path / "ca.pem").write_bytes(to_pem(CA.certificate))
    (tmp_path / "peer.pem").write_bytes(to_pem(sign_request(CA, make_request(KEY, "colon", 7), 7, now=NOW)))
    options = ["-verify_hostname", "peer-7.colon.crad.internal", "-CAfile", "ca.pem", "peer.pem"]
    for purpose in ("sslserver", "sslclient"):
        done = subprocess.run(
            [*f"openssl verify -x509_strict -purpose {purpose} -attime {NOW.timestamp():.0f}".split(), *options],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert done.stdout == "peer.pem: OK\n", done.stderr


def test_a_certificate_ends_with_its_ca() -> None:
    late = NOW + 3600 * DAY
    certificate = sign_request(CA, make_request(KEY, "colon", 7), 7, now=late)
    assert certificate.not_valid_after_utc == CA.certificate.not_valid_after_utc
    with pytest.raises(ValueError, match="cannot be signed: the CA expired on 2040-04-28"):
        sign_request(CA, make_request(KEY, "colon", 7), 7, now=NOW + 3651 * DAY)


def request_of(
    *names: x509.GeneralName, key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey = KEY, wish: bool = False
) -> x509.CertificateSigningRequest:
    """A request for these names, which with ``wish`` would also like to be a CA."""
    builder = x509.CertificateSigningRequestBuilder().subject_name(
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "peer 3")])
    )
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    if wish:
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    return builder.sign(key, hashes.SHA256())


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (make_request(KEY, "colon", 4), "asks for peer 4 of federation 'colon'; expected peer 3"),
        (make_request(KEY, "skin", 3), "is for peer 3 of federation 'skin'; expected federation 'colon'"),
        (request_of(), "names no URI"),
        (request_of(*names_of("colon", 3), *names_of("colon", 4)), "names 2 URIs"),
        (request_of(*names_of("colon", 3), x509.DNSName("localhost")), "names 2 DNS names"),
        (request_of(*names_of("colon", 3), x509.RFC822Name("a@b.org")), "names of other kinds"),
        (request_of(*names_of("colon", 3), key=p384()), "key of another kind; expected one of the curve P-256"),
        (request_of(*names_of("colon", 3), key=rsa.generate_private_key(65537, 2048)), "key of another kind"),
        (make_request(CA.key, "colon", 3), "is for the key of the CA itself"),
    ],
)
def test_requests_that_are_not_signed(request_: x509.CertificateSigningRequest, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        sign_request(CA, request_, 3, now=NOW)


def test_a_request_that_was_changed_on_its_way() -> None:
    der = make_request(KEY, "colon", 4).public_bytes(launch.authority.Encoding.DER)
    changed = der.replace(b"spiffe://colon/peer/4", b"spiffe://colon/peer/3").replace(b"peer-4.", b"peer-3.")
    with pytest.raises(ValueError, match="is not signed by the key that it is for"):
        sign_request(CA, x509.load_der_x509_csr(changed), 3, now=NOW)


def test_of_a_request_only_the_key_is_taken() -> None:
    certificate = sign_request(CA, request_of(*names_of("colon", 3), wish=True), 3, now=NOW)
    check_issued(certificate, [CA.certificate], NOW)
    assert certificate.subject == sign_request(CA, make_request(KEY, "colon", 3), 3, now=NOW).subject


def test_a_request_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "peer.csr"
    for content, words in (
        (b"hello", "holds no PEM block"),
        (to_pem(CA.certificate), "holds a certificate; expected a request"),
        (to_pem(make_request(KEY, "colon", 3))[:200], "holds a request that is cut off"),
    ):
        path.write_bytes(content)
        with pytest.raises(CertificateError, match=words):
            load_request(path)


# --- the directory of a CA --------------------------------------------------------------------------------------------


def test_a_cas_directory(tmp_path: Path) -> None:
    with pytest.raises(CertificateError, match=r"ca\.pem: is not there.*init-ca"):
        load_authority(tmp_path)
    (tmp_path / "ca.pem").write_bytes(to_pem(CA.certificate))
    with pytest.raises(CertificateError, match=r"ca\.key: is not there.*init-ca"):
        load_authority(tmp_path)
    write_file(tmp_path / "ca.key", key_to_pem(CA.key), 0o600)
    assert load_authority(tmp_path).certificate == CA.certificate
    (tmp_path / "ca.key").chmod(0o640)
    with pytest.raises(CertificateError, match=r"ca\.key: has mode 0640"):
        load_authority(tmp_path)
    write_file(tmp_path / "ca.key", key_to_pem(KEY), 0o600)
    with pytest.raises(CertificateError, match="is not the certificate of the CA with the key"):
        load_authority(tmp_path)


# --- throwaway --------------------------------------------------------------------------------------------------------


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def cas(path: Path) -> tuple[x509.Certificate, ...]:
    return load_authorities(path)


@pytest.mark.usefixtures("no_umask")
def test_throwaway(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "tls"
    throwaway(folder, "colon", [2, 0], now=NOW)
    assert set(content(folder)) == {"ca.pem"} | {
        f"{peer}/{name}" for peer in (0, 2) for name in ("ca.pem", "peer.pem", "peer.key")
    }
    for peer in (0, 2):
        found = load_credentials(folder / str(peer), "colon", peer, NOW)
        assert found.not_after == NOW + 30 * DAY
        assert found.authorities == cas(folder / "ca.pem")
        assert mode(folder / str(peer) / "peer.key") == 0o600
        assert mode(folder / str(peer)) == 0o700
    keys = [text for text in content(folder).values() if b"PRIVATE KEY" in text]
    assert len(keys) == 2  # and none of the CA


def test_throwaway_again_keeps_what_is_good(tmp_path: Path) -> None:
    throwaway(tmp_path, "colon", [0, 1], now=NOW)
    before = content(tmp_path)
    throwaway(tmp_path, "colon", [0, 1], now=NOW + 28 * DAY)
    throwaway(tmp_path, "colon", [1], now=NOW)
    assert content(tmp_path) == before


def test_throwaway_before_the_end_makes_all_anew_and_keeps_the_ca(tmp_path: Path) -> None:
    throwaway(tmp_path, "colon", [0, 1], now=NOW)
    (old,) = cas(tmp_path / "ca.pem")
    signed = load_credentials(tmp_path / "0", "colon", 0, NOW).certificate
    later = NOW + 29.5 * DAY
    throwaway(tmp_path, "colon", [0, 1], now=later)
    new, kept = cas(tmp_path / "ca.pem")
    assert kept == old
    for peer in (0, 1):
        found = load_credentials(tmp_path / str(peer), "colon", peer, later)
        assert found.issuer == new
        assert found.authorities == (new, old)  # peers check manifests that were signed before
    check_issued(signed, cas(tmp_path / "ca.pem"), None)


@pytest.mark.parametrize("what", ["lost", "readable", "foreign", "damaged", "another peer", "without its ca"])
def test_throwaway_mends(tmp_path: Path, what: str) -> None:
    throwaway(tmp_path, "colon", [0, 1], now=NOW)
    peers = [0, 1]
    if what == "lost":
        (tmp_path / "1" / "peer.pem").unlink()
    elif what == "readable":
        (tmp_path / "1" / "peer.key").chmod(0o644)
    elif what == "foreign":
        throwaway(tmp_path / "other", "colon", [1], now=NOW)
        for name in ("ca.pem", "peer.pem", "peer.key"):
            (tmp_path / "other" / "1" / name).rename(tmp_path / "1" / name)
    elif what == "damaged":
        (tmp_path / "1" / "ca.pem").write_bytes(b"")
    elif what == "without its ca":
        (tmp_path / "ca.pem").unlink()
    else:
        peers = [0, 1, 2]
    throwaway(tmp_path, "colon", peers, now=NOW)
    found = [load_credentials(tmp_path / str(peer), "colon", peer, NOW) for peer in peers]
    assert len({each.ca_pem for each in found}) == 1
    assert cas(tmp_path / "ca.pem")[0] == found[0].issuer


def test_throwaway_for_another_federation(tmp_path: Path) -> None:
    throwaway(tmp_path, "colon", [0], now=NOW)
    throwaway(tmp_path, "skin", [0], now=NOW)
    assert load_credentials(tmp_path / "0", "skin", 0, NOW)
    assert len(cas(tmp_path / "ca.pem")) == 2


class Killed(BaseException):
    """As a kill is: nothing is cleared up."""


@pytest.mark.parametrize("half", [False, True], ids=["before the rename", "after it"])
def test_throwaway_killed_at_every_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, half: bool) -> None:
    rename = crad_p2p.durable.rename
    for number in range(7):
        folder = tmp_path / str(number)
        throwaway(folder, "colon", [0, 1], now=NOW)
        (old,) = cas(folder / "ca.pem")
        done = 0

        def killing(source: Path, goal: Path, number: int = number) -> None:
            nonlocal done
            if half and done == number:
                rename(source, goal)
            if done == number:
                raise Killed
            done += 1
            rename(source, goal)

        later = NOW + 29.5 * DAY
        with monkeypatch.context() as patch:
            patch.setattr(crad_p2p.durable, "rename", killing)
            with pytest.raises(Killed):
                throwaway(folder, "colon", [0, 1], now=later)
        throwaway(folder, "colon", [0, 1], now=later)
        found = [load_credentials(folder / str(peer), "colon", peer, later) for peer in (0, 1)]
        assert len({each.ca_pem for each in found}) == 1
        assert found[0].issuer in cas(folder / "ca.pem")
        assert old in cas(folder / "ca.pem")
        assert not [name for name in content(folder) if name.endswith(".partial")]


def test_throwaway_over_something_else(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("mine")
    with pytest.raises(CertificateError, match=r"ca\.pem: holds no PEM block"):
        throwaway(tmp_path, "colon", [0], now=NOW)
    assert (tmp_path / "ca.pem").read_text() == "mine"
