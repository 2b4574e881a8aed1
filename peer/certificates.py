"""Who a peer is: its certificate, the key to it, and the CA certificates that it trusts.

A peer's TLS directory:

    ca.pem      one or more CA certificates; several while a CA is replaced
    peer.pem    this peer's certificate
    peer.key    the key to it (PKCS8, P-256, not encrypted), for its owner alone

A certificate names its peer by its one URI, ``spiffe://<federation>/peer/<id>``, and for TLS clients, which check a
host name, by its one DNS name. Nothing else in it says who it is, above all not its subject.

What is wrong with a certificate is a ValueError that goes on after the certificate's name: "expired on …".
"""

from __future__ import annotations

import functools
import hashlib
import os
import pwd
import re
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final, ParamSpec, TypeVar

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, ExtensionOID, NameOID, SignatureAlgorithmOID

from crad_p2p.errors import CertificateError
from crad_p2p.federation import FEDERATION_NAME
from crad_p2p.foreign import printable

CA_FILE: Final = "ca.pem"
CERTIFICATE_FILE: Final = "peer.pem"
KEY_FILE: Final = "peer.key"
REQUEST_FILE: Final = "peer.csr"

#: Days before its end from which a certificate is warned of.
WARN_DAYS: Final = 30
#: Bytes of a certificate that another peer may send; ours have about 600.
MAX_DER: Final = 8 * 1024
#: Bytes of a file in the TLS directory: more than a thousand CA certificates.
_MAX_FILE: Final = 1024 * 1024
_HIGHEST_ID: Final = 65535

_SIGNATURES = {
    SignatureAlgorithmOID.ECDSA_WITH_SHA256,
    SignatureAlgorithmOID.ECDSA_WITH_SHA384,
    SignatureAlgorithmOID.ECDSA_WITH_SHA512,
}
#: Critical extensions that are looked at here; a certificate with another one must be refused (RFC 5280, 4.2).
_UNDERSTOOD = {
    ExtensionOID.BASIC_CONSTRAINTS,
    ExtensionOID.KEY_USAGE,
    ExtensionOID.EXTENDED_KEY_USAGE,
    ExtensionOID.SUBJECT_ALTERNATIVE_NAME,
}

Named = x509.Certificate | x509.CertificateSigningRequest
P = ParamSpec("P")
T = TypeVar("T")
E = TypeVar("E", bound=x509.ExtensionType)


def _total(function: Callable[P, T]) -> Callable[P, T]:
    """Whatever ``cryptography`` raises over a hostile certificate is a ValueError.

    It parses extensions, names and keys only when they are asked for, and then has a dozen kinds of errors.
    """

    @functools.wraps(function)
    def safe(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except ValueError:
            raise
        except Exception as error:
            raise ValueError(f"cannot be understood ({type(error).__name__}: {printable(str(error))})") from None

    return safe


# --- identity ---------------------------------------------------------------------------------------------------------


def identity_uri(federation: str, peer: int) -> str:
    """The name of a peer in its certificate."""
    return f"spiffe://{federation}/peer/{peer}"


def host_name(federation: str, peer: int) -> str:
    """The DNS name in a peer's certificate, which TLS clients expect of it whatever its address is."""
    return f"peer-{peer}.{federation}.crad.internal"


@_total
def identity_in(named: Named) -> tuple[str, int]:
    """The federation and the peer that a certificate, or a request for one, names.

    Raises:
        ValueError: it has other names than exactly one URI and exactly one DNS name of the right form.
    """
    found = _extension(named, x509.SubjectAlternativeName)
    names = list(found.value) if found else []
    uris = [name.value for name in names if isinstance(name, x509.UniformResourceIdentifier)]
    if len(uris) != 1:
        raise ValueError(f"names {_these(uris, 'URI')}; expected exactly one, spiffe://FEDERATION/peer/ID")
    parts = re.fullmatch(r"spiffe://([^/]+)/peer/([0-9]{1,5})", uris[0])
    if not parts or not re.fullmatch(FEDERATION_NAME, parts[1]) or int(parts[2]) > _HIGHEST_ID:
        raise ValueError(f"names the URI {printable(uris[0])}; expected one of the form spiffe://FEDERATION/peer/ID")
    federation, peer = parts[1], int(parts[2])
    if uris[0] != identity_uri(federation, peer):  # leading zeros
        raise ValueError(f"names the URI {printable(uris[0])}; expected {identity_uri(federation, peer)}")
    hosts = [name.value for name in names if isinstance(name, x509.DNSName)]
    expected = host_name(federation, peer)
    if hosts != [expected]:
        raise ValueError(f"names {_these(hosts, 'DNS name')}; expected exactly one, {expected}")
    if len(names) != 2:
        others = sorted({type(name).__name__ for name in names} - {"UniformResourceIdentifier", "DNSName"})
        raise ValueError(f"has names of other kinds ({', '.join(others)}); expected one URI and one DNS name only")
    return federation, peer


def identity_of(named: Named, federation: str) -> int:
    """The peer of this federation that a certificate, or a request for one, names.

    Raises:
        ValueError: it names none, or one of another federation.
    """
    found, peer = identity_in(named)
    if found != federation:
        raise ValueError(f"is for peer {peer} of federation '{found}'; expected federation '{federation}'")
    return peer


def _these(values: Sequence[str], what: str) -> str:
    if not values:
        return f"no {what}"
    listed = ", ".join(printable(value) for value in values[:3]) + (", …" if len(values) > 3 else "")
    return f"{len(values)} {what}s ({listed})" if len(values) > 1 else f"the {what} {listed}"


@_total
def _extension(named: Named, kind: type[E]) -> x509.Extension[E] | None:
    try:
        return named.extensions.get_extension_for_class(kind)
    except x509.ExtensionNotFound:
        return None


# --- what a certificate must be ---------------------------------------------------------------------------------------


@_total
def certificate_from_der(der: bytes) -> x509.Certificate:
    """A certificate as another peer sends it, whole: all that is read of it later has been read once.

    Raises:
        ValueError: it is longer than ``MAX_DER`` bytes, or is not a certificate.
    """
    if len(der) > MAX_DER:
        raise ValueError(f"has {len(der)} bytes; expected at most {MAX_DER}")
    try:
        certificate = x509.load_der_x509_certificate(der)
        _ = (
            certificate.extensions,
            certificate.public_key(),
            certificate.subject,
            certificate.issuer,
            certificate.not_valid_before_utc,
            certificate.not_valid_after_utc,
            certificate.signature_algorithm_oid,
        )
    except Exception as error:
        raise ValueError(f"is not an X.509 certificate ({printable(str(error))})") from None
    return certificate


@_total
def check_issued(certificate: x509.Certificate, authorities: Sequence[x509.Certificate], at: datetime | None) -> None:
    """See that a peer's certificate is issued by one of these CAs, directly, and for what peers do with it.

    ``at`` is the moment at which both must be valid; None does not look at dates, as for signatures made long ago.

    Raises:
        ValueError: it is not.
    """
    _check_leaf(certificate)
    if at is not None:
        _check_dates(certificate, at)
    issuer = _issuer(certificate, authorities)
    if at is not None:
        try:
            _check_dates(issuer, at)
        except ValueError as error:
            raise ValueError(f"is issued by a CA, {name_text(issuer.subject)}, that {error}") from None


def _check_leaf(certificate: x509.Certificate) -> None:
    _refuse_authority(certificate)
    _public_key(certificate)
    _check_critical(certificate)
    if certificate.signature_algorithm_oid not in _SIGNATURES:
        found = certificate.signature_algorithm_oid
        raise ValueError(
            f"is signed by the algorithm {_oid_name(found)}; expected ECDSA with SHA-256, SHA-384 or SHA-512"
        )
    usage = _extension(certificate, x509.KeyUsage)
    if not usage or not usage.value.digital_signature:
        raise ValueError("is not for signatures; expected key usage digitalSignature")
    extended = _extension(certificate, x509.ExtendedKeyUsage)
    needed = {ExtendedKeyUsageOID.SERVER_AUTH: "serverAuth", ExtendedKeyUsageOID.CLIENT_AUTH: "clientAuth"}
    if missing := [name for oid, name in needed.items() if not extended or oid not in extended.value]:
        raise ValueError(
            f"has no extended key usage {' and '.join(missing)}; expected serverAuth and clientAuth, since a peer "
            f"is both"
        )


def _refuse_authority(certificate: x509.Certificate) -> None:
    constraints = _extension(certificate, x509.BasicConstraints)
    if constraints and constraints.value.ca:
        raise ValueError("is the certificate of a CA; expected the certificate of a peer")


def _check_critical(certificate: x509.Certificate) -> None:
    for extension in certificate.extensions:
        if extension.critical and extension.oid not in _UNDERSTOOD:
            raise ValueError(f"has a critical extension, {_oid_name(extension.oid)}, that is not understood here")


def _check_dates(certificate: x509.Certificate, at: datetime) -> None:
    start = certificate.not_valid_before_utc
    if at < start:
        raise ValueError(
            f"is not valid before {date_text(start)}, and by the clock of this machine it is {date_text(at)}"
        )
    if at > certificate.not_valid_after_utc:
        raise ValueError(f"expired on {date_text(certificate.not_valid_after_utc)}, and it is {date_text(at)}")


def _issuer(certificate: x509.Certificate, authorities: Sequence[x509.Certificate]) -> x509.Certificate:
    """The CA that issued a certificate; if it is there twice, the one that is valid for longer."""
    found: list[x509.Certificate] = []
    for authority in authorities:
        try:
            certificate.verify_directly_issued_by(authority)
            check_authority(authority)
        except (ValueError, TypeError, InvalidSignature):
            continue
        found.append(authority)
    if not found:
        known = ", ".join(_fingerprint_start(each) for each in authorities) or "none"
        raise ValueError(
            f"is not issued by a CA that is trusted here (issuer {name_text(certificate.issuer)}; CAs {known})"
        )
    return max(found, key=lambda each: each.not_valid_after_utc)


@_total
def check_authority(certificate: x509.Certificate) -> None:
    """See that this is the certificate of a CA, whatever its dates.

    Raises:
        ValueError: it is not.
    """
    constraints = _extension(certificate, x509.BasicConstraints)
    if not constraints or not constraints.value.ca:
        raise ValueError("is not the certificate of a CA (basic constraints)")
    usage = _extension(certificate, x509.KeyUsage)
    if not usage or not usage.value.key_cert_sign:
        raise ValueError("is not the certificate of a CA (key usage keyCertSign)")
    _check_critical(certificate)
    key = certificate.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey) or key.key_size < 256:
        raise ValueError(f"has {_key_name(key)}; expected one of a curve such as P-256")


@_total
def _public_key(certificate: x509.Certificate) -> ec.EllipticCurvePublicKey:
    key = certificate.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise ValueError(f"has {_key_name(key)}; expected one of the curve P-256")
    return key


def _key_name(key: object) -> str:
    if isinstance(key, ec.EllipticCurvePublicKey | ec.EllipticCurvePrivateKey):
        return f"a key of the curve {key.curve.name}"
    return f"a key of another kind ({type(key).__name__.removesuffix('PublicKey').removesuffix('PrivateKey')})"


def _oid_name(oid: x509.ObjectIdentifier) -> str:
    name = getattr(oid, "_name", "Unknown OID")
    return oid.dotted_string if name == "Unknown OID" else f"{name}"


def name_text(name: x509.Name) -> str:
    """A subject or issuer as errors and commands write it."""
    return printable(name.rfc4514_string({NameOID.SERIAL_NUMBER: "serialNumber"}))


def date_text(moment: datetime) -> str:
    """A moment as errors and commands write it."""
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M} UTC"


def fingerprint(certificate: x509.Certificate) -> str:
    """sha256 of the whole certificate, as ``openssl x509 -fingerprint -sha256`` writes it."""
    return certificate.fingerprint(hashes.SHA256()).hex(":").upper()


def key_fingerprint(key: ec.EllipticCurvePublicKey) -> str:
    """sha256 of a public key (its SubjectPublicKeyInfo): alike for a key, the request and the certificate for it."""
    der = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(der).digest().hex(":").upper()


def _fingerprint_start(certificate: x509.Certificate) -> str:
    return fingerprint(certificate)[:11] + "…"


# --- signatures -------------------------------------------------------------------------------------------------------


def sign(key: ec.EllipticCurvePrivateKey, purpose: bytes, payload: bytes) -> bytes:
    """Signature (ECDSA P-256 with SHA-256, DER) over a payload, good for this purpose only.

    Raises:
        ValueError: the purpose holds a NUL, so that it could run into the payload.
    """
    return key.sign(_separated(purpose, payload), ec.ECDSA(hashes.SHA256()))


@_total
def verify(certificate: x509.Certificate, purpose: bytes, payload: bytes, signature: bytes) -> None:
    """See that the holder of a certificate's key signed this payload for this purpose.

    Says nothing about the certificate itself (:func:`check_issued`), nor that there is but one such signature.

    Raises:
        ValueError: the signature does not fit.
    """
    try:
        _public_key(certificate).verify(signature, _separated(purpose, payload), ec.ECDSA(hashes.SHA256()))
    except InvalidSignature:
        raise ValueError("does not fit the signature: another key made it, or over something else") from None


def _separated(purpose: bytes, payload: bytes) -> bytes:
    if b"\0" in purpose:
        raise ValueError(f"the purpose {purpose!r} of a signature holds a NUL")
    return purpose + b"\0" + payload


# --- a peer's own -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Credentials:
    """What a peer shows of itself and trusts, read and found to fit. Equal if made of the same files."""

    folder: Path
    federation: str
    peer: int
    ca_pem: bytes = field(repr=False)
    certificate_pem: bytes = field(repr=False)
    key_pem: bytes = field(repr=False)
    certificate: x509.Certificate = field(repr=False, compare=False)
    key: ec.EllipticCurvePrivateKey = field(repr=False, compare=False)
    authorities: tuple[x509.Certificate, ...] = field(repr=False, compare=False)

    @property
    def not_after(self) -> datetime:
        """The end of the certificate (UTC)."""
        return self.certificate.not_valid_after_utc

    @property
    def issuer(self) -> x509.Certificate:
        """The CA that issued the certificate."""
        return _issuer(self.certificate, self.authorities)


def load_credentials(folder: Path, federation: str, peer: int, now: datetime | None = None) -> Credentials:
    """Read a peer's TLS directory, and see that all of it fits: together, to the peer, and to the time.

    Raises:
        CertificateError: something does not; the text names the file.
    """
    key, certificate = folder / KEY_FILE, folder / CERTIFICATE_FILE
    try:
        is_folder, is_there = folder.is_dir(), folder.exists()
        without_certificate = is_folder and not (certificate.exists() or certificate.is_symlink())
        asked = (folder / REQUEST_FILE).exists() and key.exists()
    except OSError as error:
        raise CertificateError(
            f"{folder}: cannot be looked into ({error.strerror}); expected a directory that this user, "
            f"{_user(os.geteuid())}, can read: correct its owner or mode, or those of the directories above it"
        ) from None
    if not is_folder:
        found = "is not a directory" if is_there else "is not there"
        raise CertificateError(
            f"{folder}: {found}; expected a directory with {CA_FILE}, {CERTIFICATE_FILE} and {KEY_FILE} of peer "
            f"{peer}: {_begin(federation, peer)}"
        )
    if without_certificate:
        remedy = f"have {folder / REQUEST_FILE} signed, and put the answer there with 'crad-mesh certs install'"
        raise CertificateError(
            f"{certificate}: is not there; expected the certificate of peer {peer}: "
            f"{remedy if asked else _begin(federation, peer)}"
        )
    return load_files(folder / CA_FILE, certificate, key, federation, peer, now)


def _begin(federation: str, peer: int) -> str:
    return f"'crad-mesh certs request --id {peer} --federation {federation}' makes a key and a request for one"


def load_files(
    ca: Path, certificate: Path, key: Path, federation: str, peer: int, now: datetime | None = None
) -> Credentials:
    """The same of files that lie anywhere; the folder of the result is the key's.

    Raises:
        CertificateError: they do not fit.
    """
    now = now or datetime.now(UTC)
    other = f"'crad-mesh certs renew --tls-dir {key.parent}' asks for another one"
    ca_pem, authorities = load_authorities(ca)
    certificate_pem, leaf = load_certificate(certificate)
    with_remedy = functools.partial(_in_file, certificate)
    with_remedy(lambda: _refuse_authority(leaf), f"put the peer's there: {other}")
    key_pem, private = load_key(key, _begin(federation, peer))
    with_remedy(lambda: _public_key(leaf), other)
    if private.public_key() != _public_key(leaf):
        raise CertificateError(
            f"{certificate}: does not belong to the key in {key}; expected the certificate that was made for this key: "
            f"put it there with 'crad-mesh certs install' (again, if that was interrupted)"
        )
    found = with_remedy(lambda: identity_of(leaf, federation), f"is this the right directory? Otherwise {other}")
    if found != peer:
        raise CertificateError(
            f"{certificate}: is for peer {found} of federation '{federation}'; expected peer {peer}: give the "
            f"directory of that peer, or start this one with the id of its certificate"
        )
    with_remedy(lambda: _check_leaf(leaf), other)
    with_remedy(lambda: _check_dates(leaf, now), f"set the clock right if it is wrong; otherwise {other}")
    issuer = with_remedy(
        lambda: _issuer(leaf, authorities),
        f"put the right CA certificate into {ca} (its fingerprint is to be had from whoever runs the CA), or let the "
        f"federation's CA sign a request: {other}",
    )
    _in_file(
        ca,
        lambda: _check_dates(issuer, now),
        "set the clock right if it is wrong; otherwise a new CA is needed: 'crad-mesh certs init-ca' makes one",
    )
    return Credentials(
        folder=key.parent,
        federation=federation,
        peer=peer,
        ca_pem=ca_pem,
        certificate_pem=certificate_pem,
        key_pem=key_pem,
        certificate=leaf,
        key=private,
        authorities=authorities,
    )


def load_authorities(
    path: Path, remedy: str = "ask whoever runs the CA for it, and give it to 'crad-mesh certs install' with --ca"
) -> tuple[bytes, tuple[x509.Certificate, ...]]:
    """Bytes and certificates of a file of CA certificates, whatever their dates.

    Raises:
        CertificateError: it cannot be read, or something else is in it.
    """
    pem = read_file(path, "the CA's certificate", remedy)
    authorities = certificates_in(path, pem, "one or more CA certificates", remedy)
    for authority in authorities:
        what = f"holds a certificate, {_fingerprint_start(authority)}, that"
        _in_file(path, lambda authority=authority: check_authority(authority), remedy, what)  # type: ignore[misc]
    return pem, authorities


def load_certificate(
    path: Path, remedy: str = "put the signed certificate there with 'crad-mesh certs install'"
) -> tuple[bytes, x509.Certificate]:
    """Bytes and certificate of a file with a single one.

    Raises:
        CertificateError: it cannot be read, or something else is in it.
    """
    pem = read_file(path, "a peer's certificate", remedy)
    found = certificates_in(path, pem, "a peer's certificate", remedy)
    if len(found) != 1:
        raise CertificateError(f"{path}: holds {len(found)} certificates; expected that of the peer alone: {remedy}")
    return pem, found[0]


def load_key(path: Path, remedy: str) -> tuple[bytes, ec.EllipticCurvePrivateKey]:
    """Bytes and key of a file that is for its owner alone; of a link, what it leads to counts.

    Raises:
        CertificateError: others may read or write it, it cannot be read, or something else is in it.
    """
    pem = read_file(path, "a private key", remedy, private=True)
    try:
        key = load_pem_private_key(pem, password=None)
    except TypeError:
        raise CertificateError(
            f"{path}: is encrypted; expected a private key without a password, since a peer starts unattended: "
            f"'openssl pkcs8 -topk8 -nocrypt' takes the password off"
        ) from None
    except Exception:  # of several kinds, by what is in it
        raise CertificateError(f"{path}: holds {kind_of(pem)}; expected a private key in PEM: {remedy}") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise CertificateError(f"{path}: holds {_key_name(key)}; expected one of the curve P-256: {remedy}")
    return pem, key


def days_left(certificate: x509.Certificate, now: datetime | None = None) -> float:
    """Days until a certificate ends, negative after it."""
    return (certificate.not_valid_after_utc - (now or datetime.now(UTC))) / timedelta(days=1)


def expiry_warning(credentials: Credentials, now: datetime | None = None) -> str | None:
    """A sentence if the certificate, or the CA's, has less than ``WARN_DAYS`` days and a third of its time to go."""
    folder = credentials.folder
    if (days := _days_if_few(credentials.certificate, now)) is not None:
        return (
            f"{folder / CERTIFICATE_FILE}: expires on {date_text(credentials.not_after)}, in {_days(days)}; "
            f"'crad-mesh certs renew --tls-dir {folder}' asks for a new one, and this peer need not stop for it"
        )
    if (days := _days_if_few(issuer := credentials.issuer, now)) is not None:
        return (
            f"{folder / CA_FILE}: the CA's certificate expires on {date_text(issuer.not_valid_after_utc)}, in "
            f"{_days(days)}; whoever runs the CA must make a new one with 'crad-mesh certs init-ca', and then every "
            f"peer asks for a new certificate with 'crad-mesh certs renew'"
        )
    return None


def _days_if_few(certificate: x509.Certificate, now: datetime | None) -> float | None:
    days, life = days_left(certificate, now), certificate.not_valid_after_utc - certificate.not_valid_before_utc
    return days if days < min(WARN_DAYS, life / timedelta(days=3)) else None


def _days(days: float) -> str:
    return f"{days:.0f} days" if days >= 1.5 else "1 day" if days >= 1 else "less than a day"


# --- files ------------------------------------------------------------------------------------------------------------


def read_file(path: Path, expected: str, remedy: str, private: bool = False) -> bytes:
    """Bytes of a small file; a private one must be for its owner alone.

    Raises:
        CertificateError: it cannot be read, is empty or huge, or is not private.
    """
    try:
        # Not to wait for a writer if it is a pipe.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                what = "a directory" if stat.S_ISDIR(status.st_mode) else "not a plain file"
                raise CertificateError(f"{path}: is {what}; expected {expected}: {remedy}")
            if private:
                _check_private(path, status)
            content = os.pread(fd, _MAX_FILE + 1, 0)
        finally:
            os.close(fd)
    except FileNotFoundError:
        raise CertificateError(f"{path}: is not there; expected {expected}: {remedy}") from None
    except OSError as error:
        raise CertificateError(
            f"{path}: cannot be read ({error.strerror}); expected {expected} that this user, {_user(os.geteuid())}, "
            f"can read: correct its owner or mode, or those of the directories above it"
        ) from None
    if not content.strip():
        raise CertificateError(f"{path}: is empty; expected {expected}: {remedy}")
    if len(content) > _MAX_FILE:
        raise CertificateError(f"{path}: has more than {_MAX_FILE} bytes; expected {expected}: {remedy}")
    return content


def _check_private(path: Path, status: os.stat_result) -> None:
    me = os.geteuid()
    if status.st_uid != me:
        all_the_same = ", who can read it all the same," if me == 0 else ""
        raise CertificateError(
            f"{path}: is owned by {_user(status.st_uid)}, and this runs as {_user(me)}{all_the_same} so that the key "
            f"is in two hands; run this as {_user(status.st_uid)}, or 'chown {_user(me)} {path}'"
        )
    if status.st_mode & 0o077:
        raise CertificateError(
            f"{path}: has mode {stat.S_IMODE(status.st_mode):04o}, so that others can read or write the key; expected "
            f"0600: 'chmod 600 {path}', and ask for a new certificate with 'crad-mesh certs renew' if somebody may "
            f"have read it"
        )


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"{uid}"


def certificates_in(path: Path, pem: bytes, expected: str, remedy: str) -> tuple[x509.Certificate, ...]:
    """The certificates in what a file holds, at least one.

    Raises:
        CertificateError: there is none, or a private key is with them.
    """
    if b"PRIVATE KEY-----" in pem:
        raise CertificateError(
            f"{path}: holds a private key; expected {expected}, which everybody may read: take the key out, and if "
            f"others have had this file, ask for a new certificate with 'crad-mesh certs renew'"
        )
    try:
        return tuple(x509.load_pem_x509_certificates(pem))
    except Exception:  # of several kinds, by what is in it
        raise CertificateError(f"{path}: holds {kind_of(pem)}; expected {expected} in PEM: {remedy}") from None


def kind_of(content: bytes) -> str:
    """What a file seems to hold, in words."""
    found = re.search(rb"-----BEGIN ([A-Z0-9 ]{1,40})-----", content)
    if not found:
        return "no PEM block (-----BEGIN …)"
    label = found[1].decode()
    kinds = {"CERTIFICATE REQUEST": "a request", "NEW CERTIFICATE REQUEST": "a request", "CERTIFICATE": "a certificate"}
    kind = "a private key" if label.endswith("PRIVATE KEY") else kinds.get(label, f"a PEM block '{label}'")
    return kind if len(re.findall(rb"-----END ", content)) else f"{kind} that is cut off"


def _in_file(path: Path, check: Callable[[], T], remedy: str, what: str = "") -> T:
    """Run a check of what is in a file.

    Raises:
        CertificateError: its ValueError, with the file and the remedy.
    """
    try:
        return check()
    except ValueError as error:
        raise CertificateError(f"{path}: {what + ' ' if what else ''}{error}; {remedy}") from None
