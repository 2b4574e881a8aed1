"""Certificates that ``crad-mesh certs`` would not make."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from launch.authority import Authority, new_authority, new_key
from peer.certificates import host_name, identity_uri

#: The time at which all tests take place, and a day.
NOW = datetime(2030, 5, 1, 12, 0, tzinfo=UTC)
DAY = timedelta(days=1)

BOTH = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)


def uri(text: str) -> x509.GeneralName:
    return x509.UniformResourceIdentifier(text)


def names_of(federation: str, peer: int) -> list[x509.GeneralName]:
    """The names as they should be."""
    return [uri(identity_uri(federation, peer)), x509.DNSName(host_name(federation, peer))]


def usage(*true: str) -> x509.KeyUsage:
    all_names = (
        "digital_signature content_commitment key_encipherment data_encipherment key_agreement key_cert_sign crl_sign "
        "encipher_only decipher_only"
    )
    return x509.KeyUsage(**{name: name in true for name in all_names.split()})


def forge(
    authority: Authority,
    key: Any = None,
    *,
    names: Sequence[x509.GeneralName] | None = (),
    start: datetime = NOW - DAY,
    end: datetime = NOW + 100 * DAY,
    extended: Sequence[x509.ObjectIdentifier] | None = BOTH,
    key_usage: x509.KeyUsage | None = None,
    constraints: x509.BasicConstraints | None = None,
    algorithm: Any = None,
    extra: Iterable[tuple[x509.ExtensionType, bool]] = (),
) -> x509.Certificate:
    """A certificate as asked for; without ``names`` those of peer 1 of colon, and None leaves an extension out."""
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([]))
        .issuer_name(authority.certificate.subject)
        .public_key((key or new_key()).public_key())
        .serial_number(7)
        .not_valid_before(start)
        .not_valid_after(end)
        .add_extension(constraints or x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(key_usage or usage("digital_signature"), critical=True)
    )
    if names is not None:
        builder = builder.add_extension(x509.SubjectAlternativeName(names or names_of("colon", 1)), critical=False)
    if extended is not None:
        builder = builder.add_extension(x509.ExtendedKeyUsage(extended), critical=False)
    for extension, critical in extra:
        builder = builder.add_extension(extension, critical=critical)
    return builder.sign(authority.key, algorithm or hashes.SHA256())


def forge_authority(
    *,
    constraints: x509.BasicConstraints | None = None,
    key_usage: x509.KeyUsage | None = None,
    key: Any = None,
    like: Authority | None = None,
    start: datetime = NOW - DAY,
    end: datetime = NOW + 1000 * DAY,
) -> Authority:
    """A CA that is not one, or not now; ``like`` another one it has its subject and key."""
    key = like.key if like else key or new_key()
    model = (like or new_authority("colon", NOW)).certificate
    builder = (
        x509.CertificateBuilder()
        .subject_name(model.subject)
        .issuer_name(model.subject)
        .public_key(key.public_key())
        .serial_number(8)
        .not_valid_before(start)
        .not_valid_after(end)
    )
    if constraints:
        builder = builder.add_extension(constraints, critical=True)
    if key_usage:
        builder = builder.add_extension(key_usage, critical=True)
    return Authority(builder.sign(key, hashes.SHA256()), key)


def genuine_authority(**changes: Any) -> Authority:
    """A CA as it should be, but for what is given."""
    settings = {
        "constraints": x509.BasicConstraints(ca=True, path_length=0),
        "key_usage": usage("key_cert_sign", "crl_sign"),
    }
    return forge_authority(**{**settings, **changes})


def p384() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP384R1())
