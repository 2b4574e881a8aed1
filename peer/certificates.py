"""What a peer's certificate must be, whom it names, and what is signed with its key.

A certificate names its peer by its one URI, ``spiffe://<federation>/peer/<id>``, and for TLS clients, which check a
host name, by its one DNS name. Nothing else in it says who it is, above all not its subject.

What is wrong with a certificate is a ValueError that goes on after the certificate's name: "expired on …".
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final, ParamSpec, TypeVar

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, ExtensionOID, NameOID, SignatureAlgorithmOID

from crad_p2p.federation import FEDERATION_NAME
from crad_p2p.foreign import printable

#: Bytes of a certificate that another peer may send; ours have about 600.
MAX_DER: Final = 8 * 1024
_HIGHEST_ID: Final = 65535
#: Characters of an error, which may name every CA that is trusted.
_MAX_TEXT: Final = 2_000

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
    """Whatever ``cryptography`` raises over a hostile certificate is a ValueError fit for a log.

    It parses extensions, names and keys only when they are asked for, and then has a dozen kinds of errors.
    """

    @functools.wraps(function)
    def safe(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except ForeignIssuerError as error:
            raise ForeignIssuerError(printable(str(error), _MAX_TEXT), error.issuer) from None
        except ValueError as error:
            raise ValueError(printable(str(error), _MAX_TEXT)) from None
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
    check_leaf(certificate)
    if at is not None:
        check_dates(certificate, at)
    issuer = issuer_of(certificate, authorities)
    if at is not None:
        try:
            check_dates(issuer, at)
        except ValueError as error:
            raise ValueError(f"is issued by a CA, {name_text(issuer.subject)}, that {error}") from None


def check_leaf(certificate: x509.Certificate) -> None:
    """See that this is a certificate for what peers do, whatever its dates and whoever issued it.

    Raises:
        ValueError: it is not.
    """
    refuse_authority(certificate)
    public_key_of(certificate)
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


def refuse_authority(certificate: x509.Certificate) -> None:
    """See that this is not the certificate of a CA.

    Raises:
        ValueError: it is.
    """
    constraints = _extension(certificate, x509.BasicConstraints)
    if constraints and constraints.value.ca:
        raise ValueError("is the certificate of a CA; expected the certificate of a peer")


def _check_critical(certificate: x509.Certificate) -> None:
    for extension in certificate.extensions:
        if extension.critical and extension.oid not in _UNDERSTOOD:
            raise ValueError(f"has a critical extension, {_oid_name(extension.oid)}, that is not understood here")


def check_dates(certificate: x509.Certificate, at: datetime) -> None:
    """See that a certificate is valid at this moment.

    Raises:
        ValueError: it is not yet, or not any more.
    """
    start = certificate.not_valid_before_utc
    if at < start:
        raise ValueError(
            f"is not valid before {date_text(start)}, and by the clock of this machine it is {date_text(at)}"
        )
    if at > certificate.not_valid_after_utc:
        raise ValueError(f"expired on {date_text(certificate.not_valid_after_utc)}, and it is {date_text(at)}")


class ForeignIssuerError(ValueError):
    """A certificate is of a CA that is not trusted.

    Attributes:
        issuer: its name; its fingerprint is not in the certificates that it issues.
    """

    def __init__(self, text: str, issuer: str) -> None:
        super().__init__(text)
        self.issuer = issuer


def authority_text(authority: x509.Certificate) -> str:
    """A CA by name, as in what it has issued, and by the start of its fingerprint, as people compare it."""
    return f"{name_text(authority.subject)} ({fingerprint_start(authority)})"


def issuer_of(certificate: x509.Certificate, authorities: Sequence[x509.Certificate]) -> x509.Certificate:
    """The CA that issued a certificate; if it is there twice, the one that is valid for longer.

    Raises:
        ForeignIssuerError: none of these did.
        ValueError: none did, though one has the name of the issuer.
    """
    found: list[x509.Certificate] = []
    named: list[x509.Certificate] = []
    for authority in authorities:
        try:
            check_authority(authority)
            if authority.subject == certificate.issuer:
                named.append(authority)
            certificate.verify_directly_issued_by(authority)
        except (ValueError, TypeError, InvalidSignature):
            continue
        found.append(authority)
    if not found:
        issuer = name_text(certificate.issuer)
        if named:
            raise ValueError(
                f"names the CA {authority_text(named[0])}, which is trusted here, and does not have its signature: it "
                f"is damaged or forged, or of another CA of the same name"
            )
        known = ", ".join(map(authority_text, authorities)) or "none"
        raise ForeignIssuerError(
            f"is not issued by a CA that is trusted here (issuer {issuer}; trusted {known})", issuer
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
        raise ValueError(f"has {key_name(key)}; expected one of a curve such as P-256")


@_total
def public_key_of(certificate: x509.Certificate) -> ec.EllipticCurvePublicKey:
    """The key in a peer's certificate.

    Raises:
        ValueError: it is of another kind than P-256.
    """
    key = certificate.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise ValueError(f"has {key_name(key)}; expected one of the curve P-256")
    return key


def key_name(key: object) -> str:
    """A key as errors write it."""
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


def issued_text(certificate: x509.Certificate, issuer: x509.Certificate) -> str:
    """By which CA a certificate was issued, and until when it is good, for people who replace a CA."""
    end = certificate.not_valid_after_utc
    return f"of the CA {fingerprint_start(issuer)}, valid until {end:%Y-%m-%d}"


def days_left(certificate: x509.Certificate, now: datetime | None = None) -> float:
    """Days until a certificate ends, negative after it."""
    return (certificate.not_valid_after_utc - (now or datetime.now(UTC))) / timedelta(days=1)


def fingerprint(certificate: x509.Certificate) -> str:
    """sha256 of the whole certificate, as ``openssl x509 -fingerprint -sha256`` writes it."""
    return certificate.fingerprint(hashes.SHA256()).hex(":").upper()


def key_fingerprint(key: ec.EllipticCurvePublicKey) -> str:
    """sha256 of a public key (its SubjectPublicKeyInfo): alike for a key, the request and the certificate for it."""
    der = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(der).digest().hex(":").upper()


def fingerprint_start(certificate: x509.Certificate) -> str:
    """The first bytes of the fingerprint, to tell a few certificates apart."""
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
        public_key_of(certificate).verify(signature, _separated(purpose, payload), ec.ECDSA(hashes.SHA256()))
    except InvalidSignature:
        raise ValueError("does not fit the signature: another key made it, or over something else") from None


def _separated(purpose: bytes, payload: bytes) -> bytes:
    if b"\0" in purpose:
        raise ValueError(f"the purpose {purpose!r} of a signature holds a NUL")
    return purpose + b"\0" + payload
