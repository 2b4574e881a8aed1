"""A peer's own files: its certificate, the key to it, and the CA certificates that it trusts.

A peer's TLS directory:

    ca.pem      one or more CA certificates; several while a CA is replaced
    peer.pem    this peer's certificate
    peer.key    the key to it (PKCS8, P-256, not encrypted), for its owner alone

What is wrong is a CertificateError that names the file, what was expected and found, and what to do. What a certificate
must be is in :mod:`peer.certificates`.
"""

from __future__ import annotations

import functools
import os
import pwd
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final, TypeVar

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from crad_p2p.errors import CertificateError
from peer.certificates import (
    check_authority,
    check_dates,
    check_leaf,
    date_text,
    days_left,
    fingerprint_start,
    identity_of,
    issuer_of,
    key_name,
    public_key_of,
    refuse_authority,
)
from peer.words import in_days

CA_FILE: Final = "ca.pem"
CERTIFICATE_FILE: Final = "peer.pem"
KEY_FILE: Final = "peer.key"
REQUEST_FILE: Final = "peer.csr"

#: Days before its end from which a certificate is warned of.
WARN_DAYS: Final = 30
#: Bytes of a file in the TLS directory: more than a thousand CA certificates.
_MAX_FILE: Final = 1024 * 1024
#: Of a certificate, in any of the forms that there have been. NULs are what UTF-16 makes of it.
_BEGINNING: Final = re.compile(rb"BEGIN (?:X509 |TRUSTED )?CERTIFICATE-----")

T = TypeVar("T")


@dataclass(frozen=True)
class Credentials:
    """What a peer shows of itself and trusts, read and found to fit. Equal if the files hold the same.

    The PEM is made anew of what was read, and is what TLS libraries are given, never the files' own bytes: these have
    to mean the same to all that read them, and of an indented line or a missing newline each library thinks otherwise.
    """

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
        return issuer_of(self.certificate, self.authorities)


def load_credentials(folder: Path, federation: str, peer: int, now: datetime | None = None) -> Credentials:
    """Read a peer's TLS directory, and see that all of it fits: together, to the peer, and to the time.

    Raises:
        CertificateError: something does not; the text names the file.
    """
    key, certificate = folder / KEY_FILE, folder / CERTIFICATE_FILE
    try:
        is_folder, is_there = folder.is_dir(), folder.exists()
        without_certificate = is_folder and not (certificate.exists() or certificate.is_symlink())
        has_key = key.exists()
        asked = (folder / REQUEST_FILE).exists() and has_key
    except OSError as error:
        raise CertificateError(
            f"{folder}: cannot be looked into ({error.strerror}); expected a directory that this user, "
            f"{_user(os.geteuid())}, can read: correct its owner or mode, or those of the directories above it"
        ) from None
    if not is_folder:
        found = "is not a directory" if is_there else "is not there"
        where = "" if folder.is_absolute() else f" (it is looked for at {folder.absolute()})"
        raise CertificateError(
            f"{folder}: {found}{where}; expected a directory with {CA_FILE}, {CERTIFICATE_FILE} and {KEY_FILE} of peer "
            f"{peer}: if it is elsewhere start in the right directory, or say with --tls-dir where; otherwise "
            f"{_begin(federation, peer, folder)}"
        )
    if without_certificate:
        remedy = _begin(federation, peer, folder)
        if asked:
            remedy = f"have {folder / REQUEST_FILE} signed, and put the answer there with 'crad-mesh certs install'"
        elif has_key:
            remedy = (
                f"if there is a copy, put it back with 'crad-mesh certs install COPY --tls-dir {folder}'; otherwise "
                f"{_request(federation, peer, folder)} makes a new request for the key that is there"
            )
        raise CertificateError(f"{certificate}: is not there; expected the certificate of peer {peer}: {remedy}")
    return load_files(folder / CA_FILE, certificate, key, federation, peer, now, in_use=True)


def _begin(federation: str, peer: int, folder: Path) -> str:
    return f"{_request(federation, peer, folder)} makes a key and a request for one"


def _request(federation: str, peer: int, folder: Path) -> str:
    place = "" if folder == Path("crad-tls", str(peer)) else f" --tls-dir {folder}"
    return f"'crad-mesh certs request --id {peer} --federation {federation}{place}'"


def load_files(
    ca: Path,
    certificate: Path,
    key: Path,
    federation: str,
    peer: int,
    now: datetime | None = None,
    another: str | None = None,
    *,
    in_use: bool = False,
) -> Credentials:
    """The same of files that lie anywhere; the folder of the result is the key's.

    Args:
        another: how to get another certificate; None for a renewal.
        in_use: whether a peer trusts these very files, so that nobody else may write them. The key is for its owner
            alone in any case.

    Raises:
        CertificateError: they do not fit.
    """
    now = now or datetime.now(UTC)
    other = another or f"'crad-mesh certs renew --tls-dir {key.parent}' asks for another one"
    authorities = load_authorities(ca, in_use=in_use)
    leaf = load_certificate(certificate, in_use=in_use)
    with_remedy = functools.partial(_in_file, certificate)
    with_remedy(lambda: refuse_authority(leaf), f"put the peer's there: {other}")
    private = load_key(key, _begin(federation, peer, key.parent))
    with_remedy(lambda: public_key_of(leaf), other)
    if private.public_key() != public_key_of(leaf):
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
    with_remedy(lambda: check_leaf(leaf), other)
    with_remedy(lambda: check_dates(leaf, now), f"set the clock right if it is wrong; otherwise {other}")
    issuer = with_remedy(
        lambda: issuer_of(leaf, authorities),
        f"put the right CA certificate into {ca} (its fingerprint is to be had from whoever runs the CA), or let the "
        f"federation's CA sign a request: {other}",
    )
    _in_file(
        ca,
        lambda: check_dates(issuer, now),
        "set the clock right if it is wrong; otherwise a new CA is needed: 'crad-mesh certs init-ca' makes one",
    )
    return Credentials(
        folder=key.parent,
        federation=federation,
        peer=peer,
        ca_pem=b"".join(each.public_bytes(Encoding.PEM) for each in authorities),
        certificate_pem=leaf.public_bytes(Encoding.PEM),
        key_pem=private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
        certificate=leaf,
        key=private,
        authorities=authorities,
    )


def load_authorities(
    path: Path,
    remedy: str = "ask whoever runs the CA for it, and give it to 'crad-mesh certs install' with --ca",
    *,
    in_use: bool = False,
) -> tuple[x509.Certificate, ...]:
    """What is in a file of CA certificates, whatever their dates.

    Raises:
        CertificateError: it cannot be read, or something else is in it.
    """
    pem = read_file(path, "the CA's certificate", remedy, in_use=in_use)
    authorities = certificates_in(path, pem, "one or more CA certificates", remedy)
    for authority in authorities:
        what = f"holds a certificate, {fingerprint_start(authority)}, that"
        _in_file(path, lambda authority=authority: check_authority(authority), remedy, what)  # type: ignore[misc]
    return authorities


def load_certificate(
    path: Path,
    remedy: str = "put the signed certificate there with 'crad-mesh certs install'",
    *,
    in_use: bool = False,
) -> x509.Certificate:
    """What is in a file of a single certificate.

    Raises:
        CertificateError: it cannot be read, or something else is in it.
    """
    pem = read_file(path, "a peer's certificate", remedy, in_use=in_use)
    found = certificates_in(path, pem, "a peer's certificate", remedy)
    if len(found) != 1:
        raise CertificateError(f"{path}: holds {len(found)} certificates; expected that of the peer alone: {remedy}")
    return found[0]


def load_key(path: Path, remedy: str, if_spoilt: str | None = None) -> ec.EllipticCurvePrivateKey:
    """What is in a file of a key that is for its owner alone; of a link, what it leads to counts.

    Args:
        remedy: for a file that is not there.
        if_spoilt: for one that is there and holds no key; None to move it away before, as nothing overwrites a key.

    Raises:
        CertificateError: others may read or write it, it cannot be read, or something else is in it.
    """
    if path.exists():
        remedy = if_spoilt or f"move it away first; then {remedy}"
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
        raise CertificateError(f"{path}: holds {key_name(key)}; expected one of the curve P-256: {remedy}")
    return key


def expiry_warning(credentials: Credentials, now: datetime | None = None) -> str | None:
    """A sentence if the certificate, or the CA's, has less than ``WARN_DAYS`` days and a third of its time to go."""
    folder = credentials.folder
    if (days := _days_if_few(credentials.certificate, now)) is not None:
        return (
            f"{folder / CERTIFICATE_FILE}: expires on {date_text(credentials.not_after)}, in {in_days(days)}; "
            f"'crad-mesh certs renew --tls-dir {folder}' asks for a new one, and this peer need not stop for it"
        )
    if (days := _days_if_few(issuer := credentials.issuer, now)) is not None:
        return (
            f"{folder / CA_FILE}: the CA's certificate expires on {date_text(issuer.not_valid_after_utc)}, in "
            f"{in_days(days)}; whoever runs the CA must make a new one with 'crad-mesh certs init-ca', and then every "
            f"peer asks for a new certificate with 'crad-mesh certs renew'"
        )
    return None


def _days_if_few(certificate: x509.Certificate, now: datetime | None) -> float | None:
    days, life = days_left(certificate, now), certificate.not_valid_after_utc - certificate.not_valid_before_utc
    return days if days < min(WARN_DAYS, life / timedelta(days=3)) else None


# --- files ------------------------------------------------------------------------------------------------------------


def read_file(path: Path, expected: str, remedy: str, *, private: bool = False, in_use: bool = False) -> bytes:
    """Bytes of a small file; a private one must be for its owner alone, and one in use not for others to write.

    Raises:
        CertificateError: it cannot be read, is empty or huge, or others can do with it what they must not.
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
            elif in_use:
                _check_not_writable(path, status)
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


def _check_not_writable(path: Path, status: os.stat_result) -> None:
    if status.st_mode & 0o022:
        raise CertificateError(
            f"{path}: has mode {stat.S_IMODE(status.st_mode):04o}, so that others can write it and decide whom this "
            f"peer trusts, or what it shows; expected 0644: see with 'crad-mesh certs inspect {path}' that the right "
            f"fingerprint is still in it, then 'chmod 644 {path}'"
        )


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"{uid}"


def certificates_in(path: Path, pem: bytes, expected: str, remedy: str) -> tuple[x509.Certificate, ...]:
    """The certificates in what a file holds, at least one.

    Raises:
        CertificateError: there is none, one cannot be read, or a private key is with them.
    """
    if b"PRIVATE KEY-----" in pem:
        raise CertificateError(
            f"{path}: holds a private key; expected {expected}, which everybody may read: take the key out, and if "
            f"others have had this file, ask for a new certificate with 'crad-mesh certs renew'"
        )
    try:
        found = tuple(x509.load_pem_x509_certificates(pem))
    except Exception:  # of several kinds, by what is in it
        raise CertificateError(f"{path}: holds {kind_of(pem)}; expected {expected} in PEM: {remedy}") from None
    # A block of which not even the end is found is passed over without a word, and a CA would be missing.
    if (begun := len(_BEGINNING.findall(pem.replace(b"\0", b"")))) != len(found):
        raise CertificateError(
            f"{path}: {begun} certificates begin in it, and {len(found)} can be read; expected {expected} in PEM: "
            f"{remedy}"
        )
    return found


def kind_of(content: bytes) -> str:
    """What a file seems to hold, in words."""
    found = re.search(rb"-----BEGIN ([A-Z0-9 ]{1,40})-----", content)
    if not found:
        in_utf16 = b"-----BEGIN " in content.replace(b"\0", b"")
        return "a text in UTF-16, not in ASCII" if in_utf16 else "no PEM block (-----BEGIN …)"
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
