"""``crad-mesh certs``: from a federation's CA to the certificate of every peer, by files that people carry."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from crad_p2p.errors import CertificateError, UsageError
from crad_p2p.federation import FEDERATION_NAME, load_federation
from crad_p2p.lines import say

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

app = typer.Typer(
    no_args_is_help=True,
    help="Make and look at certificates: a CA for the federation, and one certificate for every peer.",
)

ISSUED_FILE = "issued.jsonl"
_DAYS = range(1, 3651)

PeerId = Annotated[int, typer.Option("--id", min=0, max=65535, help="Which peer of the federation.")]


@app.command("init-ca")
def init_ca(
    federation: Annotated[str, typer.Option(help="Name of the federation, as in peers.yaml.")],
    out: Annotated[Path, typer.Option(help="The CA's directory.")] = Path("crad-ca"),
) -> None:
    """Make the CA of a federation: once, on a machine of whoever runs it.

    Example: crad-mesh certs init-ca --federation colon
    """
    from crad_p2p.durable import write_file
    from launch.authority import (
        CA_KEY_FILE,
        beside,
        key_to_pem,
        make_folder,
        new_authority,
        to_pem,
    )
    from peer.certificates import fingerprint
    from peer.credentials import CA_FILE

    _check_name(federation)
    for path in (out / CA_KEY_FILE, out / CA_FILE):
        _refuse_existing(path, "every certificate hangs on it: give another directory with --out")
    authority = new_authority(federation)
    earlier = beside(out, federation)
    with _writing():
        make_folder(out)
        write_file(out / CA_FILE, to_pem(authority.certificate))
        write_file(out / CA_KEY_FILE, key_to_pem(authority.key), 0o600)
    say(f"The CA of federation {federation} is made, in {out}:")
    say(f"  {out / CA_KEY_FILE}  stays here, and nobody else gets it; keep a copy of {out} under lock and key")
    say(f"  {out / CA_FILE}  is for every site; its fingerprint (sha256) is")
    say(f"  {fingerprint(authority.certificate)}")
    if earlier:
        old = earlier[0][0]
        say(f"An earlier CA of this federation is in {old}. If this one is to follow it, next:")
        say(f"  cat {out / CA_FILE} {old / CA_FILE} > both.pem")
        say(
            "Send both.pem to every site, and read the fingerprint out by telephone. When all have put it in the place "
            "of their ca.pem, every site runs"
        )
        say("  crad-mesh certs renew")
        say("and its request is signed here with the new CA:")
        say(f"  crad-mesh certs sign next.csr --id ID --ca {out}")
        say(f"Sign nothing with {old} any more, and move it away. docs/certificates.md, 'A new CA', has every step.")
        return
    say(f"Next: send {out / CA_FILE} to every site and read the fingerprint out by telephone; every site runs")
    say(f"  crad-mesh certs request --id ID --federation {federation}")


@app.command()
def request(
    peer_id: PeerId,
    peers: Annotated[Path | None, typer.Option(help="The federation file, which has the federation's name.")] = None,
    federation: Annotated[str | None, typer.Option(help="That name, instead of --peers.")] = None,
    tls_dir: Annotated[
        Path | None, typer.Option(help="Where this peer's certificate will be; by default crad-tls/ID here.")
    ] = None,
) -> None:
    """Make a peer's key, and a request for the certificate to it: on the site itself.

    A key that is there without a request and certificate is kept, and a new
    request for it is made.

    Example: crad-mesh certs request --id 0 --peers peers.yaml
    """
    from peer.credentials import (
        CERTIFICATE_FILE,
        KEY_FILE,
        REQUEST_FILE,
        load_key,
    )

    name = _name_of_federation(peers, federation, peer_id)
    folder = tls_dir or Path("crad-tls", str(peer_id))
    is_key_alone = not any(_is_taken(folder / each) for each in (CERTIFICATE_FILE, REQUEST_FILE))
    if is_key_alone and (folder / KEY_FILE).exists():
        key = load_key(folder / KEY_FILE, "'crad-mesh certs request' makes one")
        _new_request(folder, KEY_FILE, REQUEST_FILE, name, peer_id, key)
        return
    if (folder / CERTIFICATE_FILE).exists():
        advice = f"'crad-mesh certs renew --tls-dir {folder}' makes another one beside it"
    else:
        advice = f"send {folder / REQUEST_FILE}, or remove the key to begin anew"
    _refuse_existing(folder / KEY_FILE, advice)
    _new_request(folder, KEY_FILE, REQUEST_FILE, name, peer_id)


@app.command()
def sign(
    path: Annotated[Path, typer.Argument(metavar="REQUEST", help="The request of a site.")],
    peer_id: PeerId,
    ca: Annotated[Path, typer.Option(help="The CA's directory.")] = Path("crad-ca"),
    days: Annotated[int, typer.Option(help=f"How long it is good, {_DAYS[0]} to {_DAYS[-1]}.")] = 365,
    out: Annotated[Path | None, typer.Option(help="The certificate; by default peer-ID.pem here.")] = None,
) -> None:
    """Sign a peer's request: where the CA is, after a look at who sent it.

    The request must ask for just this peer of the CA's federation. What is
    signed is also listed in the CA's issued.jsonl.

    Example: crad-mesh certs sign from-site-a/peer.csr --id 0
    """
    from crad_p2p.durable import write_file
    from launch.authority import (
        beside,
        load_authority,
        load_request,
        sign_request,
        to_pem,
    )
    from launch.inspection import NEXT_REQUEST_FILE, describe
    from peer.certificates import date_text
    from peer.credentials import CA_FILE

    if days not in _DAYS:
        raise UsageError(f"--days {days}: must be from {_DAYS[0]} to {_DAYS[-1]}")
    authority = load_authority(ca)
    asked = load_request(path)
    out = out or Path(f"peer-{peer_id}.pem")
    _refuse_existing(out, "give another name with --out")
    try:
        certificate = sign_request(authority, asked, peer_id, days)
    except ValueError as error:
        raise CertificateError(
            f"{path}: {error}; nothing is signed: ask the site, by telephone, what it sent"
        ) from None
    has_had_one = peer_id in _issued_to(ca / ISSUED_FILE) or path.name == NEXT_REQUEST_FILE
    with _writing():
        _list_issued(ca / ISSUED_FILE, peer_id, certificate)  # first, so that nothing is signed unlisted
        write_file(out, to_pem(certificate))
    say(f"{out}: certificate of peer {peer_id} of federation {authority.federation}")
    describe(certificate)
    start = authority.certificate.not_valid_before_utc
    for folder, other in beside(ca, authority.federation)[:1]:
        if other.not_valid_before_utc > start:
            say(
                f"Warning: {folder / CA_FILE} is a newer CA of this federation (from "
                f"{date_text(other.not_valid_before_utc)}; the one that has signed is from {date_text(start)}). If it "
                f"follows this one, throw {out} away, sign again with --ca {folder}, and move {ca} away."
            )
    if has_had_one:
        say(f"Next: send {out} to the site of peer {peer_id}, which runs")
        say(f"  crad-mesh certs install {out.name}")
        say(f"With --ca and {ca / CA_FILE} it would trust that CA alone from then on.")
    else:
        say(f"Next: send {out} and {ca / CA_FILE} to the site of peer {peer_id}, which runs")
        say(f"  crad-mesh certs install {out.name} --ca {CA_FILE}")
        say(f"or, if it has a {CA_FILE} already, without --ca, which would replace that.")


@app.command()
def install(
    signed: Annotated[Path, typer.Argument(help="The certificate that came back.")],
    tls_dir: Annotated[
        Path | None, typer.Option(help="Where the request was made; by default crad-tls/ID here.")
    ] = None,
    ca: Annotated[Path | None, typer.Option(help="The CA's certificate, needed the first time.")] = None,
) -> None:
    """Put a signed certificate in place, after a check that it fits the key that waits for it: on the site.

    A peer that runs takes it up by itself. If this is interrupted, the same command again finishes it.

    Example: crad-mesh certs install peer-0.pem --ca ca.pem
    """
    from crad_p2p.durable import (
        rename,
        write_file,
    )
    from launch.authority import load_request
    from launch.inspection import NEXT_KEY_FILE, NEXT_REQUEST_FILE, describe, identity_named
    from peer.certificates import fingerprint
    from peer.credentials import (
        CA_FILE,
        CERTIFICATE_FILE,
        KEY_FILE,
        REQUEST_FILE,
        load_certificate,
        load_files,
    )

    certificate = load_certificate(signed, "give the file that came back from whoever runs the CA")
    identity = identity_named(signed, certificate)
    folder = tls_dir or Path("crad-tls", str(identity[1]))
    key = _waiting_key(folder, signed, certificate)
    asked = folder / (NEXT_REQUEST_FILE if key.name == NEXT_KEY_FILE else REQUEST_FILE)
    if asked.exists() and (wanted := identity_named(asked, load_request(asked))) != identity:
        raise CertificateError(
            f"{signed}: is for peer {identity[1]} of federation '{identity[0]}', and {asked} asked for peer "
            f"{wanted[1]} of '{wanted[0]}'; have it signed as it is"
        )
    if ca is None and not (folder / CA_FILE).exists():
        raise UsageError(f"{folder / CA_FILE}: is not there yet; give the CA's certificate with --ca")
    if key.name == KEY_FILE and (folder / NEXT_KEY_FILE).exists():
        raise CertificateError(
            f"{signed}: is for the key that is in use already, and a renewal waits for its answer; give the file that "
            f"came back for {folder / NEXT_REQUEST_FILE}"
        )
    trusted = ca or folder / CA_FILE
    _require_issuer(signed, certificate, trusted)
    again = f"have {asked.name} signed again" if asked.exists() else None  # it is no renewal before the first one
    fitting = load_files(trusted, signed, key, *identity, another=again)
    with _writing():
        if ca is not None:
            write_file(folder / CA_FILE, fitting.ca_pem)
        if key.name == NEXT_KEY_FILE:
            rename(key, folder / KEY_FILE)
        write_file(folder / CERTIFICATE_FILE, fitting.certificate_pem)
        asked.unlink(missing_ok=True)
        if not (folder / NEXT_KEY_FILE).exists():
            (folder / NEXT_REQUEST_FILE).unlink(missing_ok=True)  # of an installation that was interrupted
    say(f"{folder}: certificate of peer {identity[1]} of federation {identity[0]}")
    describe(certificate)
    say("It was signed by the CA with the fingerprint (sha256)")
    say(f"  {fingerprint(fitting.issuer)}")
    say(
        f"Next: compare this fingerprint by telephone with whoever runs the CA, if that is not done yet. A peer that "
        f"runs takes the new files up by itself. {folder / KEY_FILE} never leaves this machine."
    )


@app.command()
def renew(
    tls_dir: Annotated[
        Path | None, typer.Option(help="The peer's directory; by default the only one in crad-tls here.")
    ] = None,
) -> None:
    """Make a new key and a request for it, beside those in use: on the site, before the certificate expires.

    Example: crad-mesh certs renew --tls-dir crad-tls/0
    """
    from launch.inspection import NEXT_KEY_FILE, NEXT_REQUEST_FILE, identity_named
    from peer.certificates import (
        date_text,
        days_left,
    )
    from peer.credentials import (
        CERTIFICATE_FILE,
        load_certificate,
    )

    folder = tls_dir or _only_directory()
    path = folder / CERTIFICATE_FILE
    certificate = load_certificate(path, "for a first certificate use 'crad-mesh certs request'")
    identity = identity_named(path, certificate)
    _refuse_existing(
        folder / NEXT_KEY_FILE,
        f"a renewal is under way: send {folder / NEXT_REQUEST_FILE}, or remove the key to begin anew",
    )
    end = date_text(certificate.not_valid_after_utc)
    if days_left(certificate) > 0:
        say(f"{path}: stays in use until the new certificate is installed; it expires on {end}")
    else:
        say(f"{path}: expired on {end}, and no peer accepts it; the new certificate is in use once it is installed")
    _new_request(folder, NEXT_KEY_FILE, NEXT_REQUEST_FILE, *identity)


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(help="A certificate, request or key, or a directory of them.")],
) -> None:
    """Say what a file is, and whether a peer would accept a directory.

    Of a directory such as crad-tls, all that are in it.

    Example: crad-mesh certs inspect crad-tls/0
    """
    from launch import inspection

    inspection.inspect(path)


# --- steps ------------------------------------------------------------------------------------------------------------


def _new_request(
    folder: Path,
    key_file: str,
    request_file: str,
    federation: str,
    peer: int,
    key: ec.EllipticCurvePrivateKey | None = None,
) -> None:
    """A new key, unless there is one, and the request for it, and what to do with them."""
    from crad_p2p.durable import write_file
    from launch.authority import (
        key_to_pem,
        make_folder,
        make_request,
        new_key,
        to_pem,
    )
    from launch.inspection import describe_key

    is_there, key = key is not None, key or new_key()
    with _writing():
        make_folder(folder)
        # The key last: once it is there, both are.
        write_file(folder / request_file, to_pem(make_request(key, federation, peer)))
        if not is_there:
            write_file(folder / key_file, key_to_pem(key), 0o600)
    for_what = f", for the key that is in {folder / key_file} already" if is_there else ""
    say(f"{folder / request_file}: request for peer {peer} of federation {federation}{for_what}")
    describe_key(key.public_key())
    say(f"Next: send {folder / request_file} to whoever runs the CA, and read the fingerprint out by telephone; there")
    say(f"  crad-mesh certs sign {request_file} --id {peer}")
    say(f"signs it. {folder / key_file} never leaves this machine, not even for the CA.")


def _list_issued(path: Path, peer: int, certificate: x509.Certificate) -> None:
    from peer.certificates import fingerprint

    line = json.dumps(
        {
            "serial": f"{certificate.serial_number:x}",
            "id": peer,
            "not_before": certificate.not_valid_before_utc.isoformat(),
            "not_after": certificate.not_valid_after_utc.isoformat(),
            "sha256": fingerprint(certificate),
        }
    )
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        os.write(fd, f"{line}\n".encode())
        os.fsync(fd)
    finally:
        os.close(fd)


def _issued_to(path: Path) -> set[object]:
    """The peers that have had a certificate; a line that is damaged says nothing."""
    peers: set[object] = set()
    try:
        lines = path.read_bytes().splitlines()
    except OSError:  # nothing was signed yet, or the next line says why it cannot be used
        return peers
    for line in lines:
        with suppress(ValueError, KeyError, TypeError, RecursionError):
            peers.add(json.loads(line)["id"])
    return peers


def _require_issuer(signed: Path, certificate: x509.Certificate, ca: Path) -> None:
    """See that a certificate that came back is from a CA in this file.

    Raises:
        CertificateError: it is from another one, or the file holds none.
    """
    from peer.certificates import (
        fingerprint,
        name_text,
    )
    from peer.credentials import load_authorities

    authorities = load_authorities(ca)
    if not any(_has_issued(authority, certificate) for authority in authorities):
        known = ", ".join(map(fingerprint, authorities))
        raise CertificateError(
            f"{signed}: is from another CA, {name_text(certificate.issuer)}, than that in {ca}, whose fingerprint is "
            f"{known}; ask whoever runs the federation's CA, by telephone, whether that is the fingerprint of its "
            f"ca.pem. If not, ask for the right ca.pem and give it with --ca; if so, somebody else has signed this: "
            f"have the request signed there"
        )


def _has_issued(authority: x509.Certificate, certificate: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except Exception:  # of several kinds, by what is in the two
        return False
    return True


def _waiting_key(folder: Path, signed: Path, certificate: x509.Certificate) -> Path:
    """The key in a peer's directory that a certificate is for."""
    from launch.inspection import NEXT_KEY_FILE, identity_named
    from peer.credentials import (
        KEY_FILE,
        load_key,
    )

    there = [path for path in (folder / NEXT_KEY_FILE, folder / KEY_FILE) if path.exists()]
    for path in there:
        key = load_key(path, f"'crad-mesh certs {'renew' if path.name == NEXT_KEY_FILE else 'request'}' makes one")
        if key.public_key() == certificate.public_key():
            return path
    federation, peer = identity_named(signed, certificate)
    raise CertificateError(
        f"{signed}: is the certificate of peer {peer} of federation '{federation}', and not for a key in {folder} "
        f"(there {_words(there)}); expected the answer to the request that was made "
        f"there: give the right directory with --tls-dir, or have the newest request signed"
    )


def _words(keys: list[Path]) -> str:
    return f"is {' and '.join(path.name for path in keys)}" if keys else "is no key"


def _only_directory() -> Path:
    from peer.credentials import CERTIFICATE_FILE

    found = sorted(path.parent for path in Path("crad-tls").glob(f"*/{CERTIFICATE_FILE}"))
    if len(found) != 1:
        there = f"certificates are in {', '.join(map(str, found))}" if found else "no certificate is in crad-tls here"
        raise UsageError(f"{there}; say with --tls-dir which directory is meant")
    return found[0]


def _name_of_federation(peers: Path | None, federation: str | None, peer: int) -> str:
    if peers is not None and federation is None:
        whole = load_federation(peers)
        whole.peer(peer, peers)  # it is in the file
        return whole.federation
    if federation is not None and peers is None:
        return _check_name(federation)
    raise UsageError("give either --peers with the federation file, or --federation with its name")


def _check_name(federation: str) -> str:
    if not re.fullmatch(FEDERATION_NAME, federation):
        raise UsageError(
            f"--federation '{federation}' must be lower-case letters, digits and hyphens, 63 at most, as in peers.yaml"
        )
    return federation


def _is_taken(path: Path) -> bool:
    return path.exists() or path.is_symlink()


def _refuse_existing(path: Path, advice: str) -> None:
    if _is_taken(path):
        raise UsageError(f"{path}: is there already, and is not overwritten; {advice}")


@contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        what = error.filename or "a file"
        raise UsageError(f"{what}: cannot be written ({error.strerror}); mend that, or choose another place") from None
