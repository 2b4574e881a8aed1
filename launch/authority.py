"""A federation's certificate authority: making one, and certificates for peers.

The CA's directory, on a machine of whoever runs it:

    ca.pem         its certificate, which every peer gets
    ca.key         the key to it, which nobody else gets
    issued.jsonl   what it has signed, a line a certificate
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from crad_p2p.durable import write_file
from crad_p2p.errors import CertificateError
from peer.certificates import check_authority, days_left, host_name, identity_of, identity_uri
from peer.credentials import (
    CA_FILE,
    CERTIFICATE_FILE,
    KEY_FILE,
    kind_of,
    load_authorities,
    load_credentials,
    load_key,
    read_file,
)

CA_KEY_FILE: Final = "ca.key"
#: Days for which a CA is good.
CA_DAYS: Final = 3650
#: Days for which a peer's certificate is good.
PEER_DAYS: Final = 365
#: Clocks of other sites may be behind by this much.
_CLOCKS: Final = timedelta(days=1)


@dataclass(frozen=True)
class Authority:
    """A CA: its certificate, and the key to it."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey = field(repr=False)

    @property
    def federation(self) -> str:
        """The federation whose CA it is."""
        return str(self.certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)


def new_key() -> ec.EllipticCurvePrivateKey:
    """A new key of the curve P-256."""
    return ec.generate_private_key(ec.SECP256R1())


def key_to_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """PKCS8, not encrypted."""
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def to_pem(item: x509.Certificate | x509.CertificateSigningRequest) -> bytes:
    """A certificate or request as text."""
    return item.public_bytes(Encoding.PEM)


def new_authority(federation: str, now: datetime | None = None) -> Authority:
    """A new CA for a federation, which can sign certificates of peers and no further CAs."""
    now, key = now or datetime.now(UTC), new_key()
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    # With a number, so that the CA that follows this one has another name.
    name = x509.Name(
        [
            x509.NameAttribute(NameOID.COMMON_NAME, federation),
            x509.NameAttribute(NameOID.SERIAL_NUMBER, identifier.digest[:4].hex()),
        ]
    )
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCKS)
        .not_valid_after(now + timedelta(days=CA_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(key_cert_sign=True, crl_sign=True), critical=True)
        .add_extension(identifier, critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False)
        .sign(key, hashes.SHA256())
    )
    return Authority(certificate, key)


def load_authority(folder: Path) -> Authority:
    """The CA in a directory that ``crad-mesh certs init-ca`` has made.

    Raises:
        CertificateError: it is not there, or is damaged.
    """
    begin = "'crad-mesh certs init-ca' makes a CA; give its directory with --ca"
    authorities = load_authorities(folder / CA_FILE, begin)
    copy = "put back the copy that was kept of it; without one a new CA is needed, in another directory"
    key = load_key(folder / CA_KEY_FILE, begin, copy)
    for certificate in authorities:
        if certificate.public_key() == key.public_key():
            if not certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME):
                break
            return Authority(certificate, key)
    raise CertificateError(
        f"{folder / CA_FILE}: is not the certificate of the CA with the key {folder / CA_KEY_FILE}; expected the two "
        f"files as they were made: {begin}"
    )


def beside(folder: Path, federation: str) -> list[tuple[Path, x509.Certificate]]:
    """Directories of other CAs of the same federation in the same place, and their certificates, the newest first."""
    found = []
    for path in folder.absolute().parent.glob(f"*/{CA_FILE}"):
        if path.parent.name == folder.absolute().name:
            continue
        with suppress(CertificateError):  # of something else
            found += [
                (folder.parent / path.parent.name, each)
                for each in load_authorities(path)
                if federation in [name.value for name in each.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
            ]
    return sorted(found, key=lambda each: each[1].not_valid_before_utc, reverse=True)


def make_request(key: ec.EllipticCurvePrivateKey, federation: str, peer: int) -> x509.CertificateSigningRequest:
    """A request for a certificate, signed by the key that it is for."""
    return (
        x509.CertificateSigningRequestBuilder()
        .subject_name(_subject(federation, peer))
        .add_extension(_names(federation, peer), critical=False)
        .sign(key, hashes.SHA256())
    )


def load_request(path: Path) -> x509.CertificateSigningRequest:
    """A request as it came; :func:`sign_request` checks it.

    Raises:
        CertificateError: it cannot be read, or something else is in it.
    """
    remedy = "have the site make one with 'crad-mesh certs request'"
    pem = read_file(path, "a request for a certificate", remedy)
    try:
        return x509.load_pem_x509_csr(pem)
    except Exception:  # of several kinds, by what is in it
        raise CertificateError(
            f"{path}: holds {kind_of(pem)}; expected a request for a certificate in PEM: {remedy}"
        ) from None


def sign_request(
    authority: Authority,
    request: x509.CertificateSigningRequest,
    peer: int,
    days: int = PEER_DAYS,
    now: datetime | None = None,
) -> x509.Certificate:
    """A certificate for a peer of the CA's federation. Of the request only the public key goes into it.

    It ends with the CA, if that is sooner than in so many days.

    Raises:
        ValueError: the request is not the holder's of its key, has another kind of key, or asks for another identity
            than that of this peer; the text goes on after the request's name. Or the CA has expired.
    """
    now = now or datetime.now(UTC)
    try:
        genuine, public = request.is_signature_valid, request.public_key()
    except Exception:  # of several kinds, by what is in it
        genuine, public = False, None
    if not genuine:
        raise ValueError("is not signed by the key that it is for: it was changed on its way, or cut")
    if not isinstance(public, ec.EllipticCurvePublicKey) or not isinstance(public.curve, ec.SECP256R1):
        raise ValueError("is for a key of another kind; expected one of the curve P-256")
    if (found := identity_of(request, authority.federation)) != peer:
        raise ValueError(f"asks for peer {found} of federation '{authority.federation}'; expected peer {peer}")
    if public == authority.key.public_key():
        raise ValueError("is for the key of the CA itself")
    if days_left(authority.certificate, now) <= 0:
        raise ValueError(f"cannot be signed: the CA expired on {authority.certificate.not_valid_after_utc:%Y-%m-%d}")
    return _issue(authority, public, peer, days, now)


def throwaway(folder: Path, federation: str, ids: Iterable[int], days: int = 30, now: datetime | None = None) -> None:
    """Certificates for a mesh on this machine: a CA in ``folder/ca.pem``, and a TLS directory ``folder/ID`` a peer.

    The CA's key is forgotten at once. What is there stays if all of it is good for another day. Otherwise all is made
    anew, and the earlier CAs stay beside the new one: manifests of earlier rounds are signed under them.

    Raises:
        CertificateError: ``folder/ca.pem`` holds something else.
        OSError: the files cannot be written.
    """
    now, ids = now or datetime.now(UTC), sorted(ids)
    bundle = folder / CA_FILE
    earlier = load_authorities(bundle) if bundle.exists() else ()
    if _good_for_a_day(folder, federation, ids, earlier, now):
        return
    authority = new_authority(federation, now)
    make_folder(folder)
    # First, so that after a kill in between every CA that has signed something is in it.
    write_file(bundle, b"".join(map(to_pem, (authority.certificate, *earlier))))
    for peer in ids:
        key = new_key()
        make_folder(folder / str(peer))
        write_file(folder / str(peer) / KEY_FILE, key_to_pem(key), 0o600)
        write_file(folder / str(peer) / CERTIFICATE_FILE, to_pem(_issue(authority, key.public_key(), peer, days, now)))
        write_file(folder / str(peer) / CA_FILE, bundle.read_bytes())


def _good_for_a_day(
    folder: Path, federation: str, ids: Iterable[int], authorities: tuple[x509.Certificate, ...], now: datetime
) -> bool:
    try:
        found = [load_credentials(folder / str(peer), federation, peer, now) for peer in ids]
    except CertificateError:
        return False
    # All of the same CA, or they would not accept one another.
    return (
        len({each.ca_pem for each in found}) == 1
        and all(each.issuer in authorities and days_left(each.certificate, now) > 1 for each in found)
        and days_left(found[0].issuer, now) > 1
    )


def _issue(
    authority: Authority, public: ec.EllipticCurvePublicKey, peer: int, days: int, now: datetime
) -> x509.Certificate:
    check_authority(authority.certificate)
    end = min(now + timedelta(days=days), authority.certificate.not_valid_after_utc)
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    return (
        x509.CertificateBuilder()
        .subject_name(_subject(authority.federation, peer))
        .issuer_name(authority.certificate.subject)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCKS)
        .not_valid_after(end)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(digital_signature=True), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False
        )
        .add_extension(_names(authority.federation, peer), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(issuer, critical=False)
        .sign(authority.key, hashes.SHA256())
    )


def _subject(federation: str, peer: int) -> x509.Name:
    """For people; programs go by the names of :func:`_names`."""
    return x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, federation),
            x509.NameAttribute(NameOID.COMMON_NAME, f"peer {peer}"),
        ]
    )


def _names(federation: str, peer: int) -> x509.SubjectAlternativeName:
    return x509.SubjectAlternativeName(
        [
            x509.UniformResourceIdentifier(identity_uri(federation, peer)),
            x509.DNSName(host_name(federation, peer)),
        ]
    )


def _usage(*, digital_signature: bool = False, key_cert_sign: bool = False, crl_sign: bool = False) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        key_cert_sign=key_cert_sign,
        crl_sign=crl_sign,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


# --- files ------------------------------------------------------------------------------------------------------------


def make_folder(folder: Path) -> None:
    """A directory that only its owner may look into, unless it is there already."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
