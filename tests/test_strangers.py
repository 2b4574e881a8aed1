"""Who answers in place of a peer is described, and whoever can mend it is named."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from wire import in_loop

from crad_p2p.durable import write_file
from launch.authority import (
    Authority,
    key_to_pem,
    make_request,
    new_authority,
    new_key,
    sign_request,
    to_pem,
)
from peer.credentials import load_credentials
from peer.strangers import Stranger, describe_stranger
from peer.tls import Tls

NOW = datetime.now(UTC)
OURS = new_authority("one")


def give(folder: Path, authority: Authority, federation: str, peer: int, now: datetime = NOW) -> Path:
    """Certificate files that are good for ten days from then on."""
    key = new_key()
    folder.mkdir(parents=True)
    write_file(folder / "peer.key", key_to_pem(key), 0o600)
    write_file(folder / "peer.pem", to_pem(sign_request(authority, make_request(key, federation, peer), peer, 10, now)))
    write_file(folder / "ca.pem", to_pem(authority.certificate))
    return folder


async def described(folder: Path, tls: Tls, trusts: Path | None = None) -> Stranger | None:
    """What peer 0 finds where peer 1 should be, and this certificate is shown."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "peer.pem", folder / "peer.key")
    context.set_alpn_protocols(["h2"])
    if trusts is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(trusts / "ca.pem")

    def shake_hands() -> None:
        with suppress(OSError), context.wrap_socket(server.accept()[0], server_side=True) as connection:
            connection.recv(1)  # until the other end has seen enough

    with socket.create_server(("127.0.0.1", 0)) as server:
        serving = asyncio.ensure_future(asyncio.to_thread(shake_hands))
        found = await describe_stranger(f"127.0.0.1:{server.getsockname()[1]}", 1, tls)
        await serving
        return found


@pytest.mark.parametrize(
    ("give_there", "text", "remedy"),
    [
        (
            lambda folder: give(folder, OURS, "one", 1, NOW - timedelta(days=20)),
            "the certificate there expired on",
            "the site of peer 1 must renew it, with 'crad-mesh certs renew' there",
        ),
        (
            lambda folder: give(folder, OURS, "one", 1, NOW + timedelta(days=20)),
            "the certificate there is not valid before",
            "set the clock right, here or at the site of peer 1",
        ),
        (
            lambda folder: give(folder, new_authority("one"), "one", 1),
            "the certificate there is not issued by a CA that is trusted here",
            "compare the CA's fingerprint with the site of peer 1",
        ),
        (
            lambda folder: give(folder, OURS, "one", 2),
            "the certificate there is that of peer 2, expected that of peer 1",
            "see that this is the address of peer 1",
        ),
        (
            lambda folder: give(folder, new_authority("two"), "two", 1),
            "the certificate there is for peer 1 of federation 'two'",
            "see that this is the address of peer 1",
        ),
    ],
    ids=["expired", "early", "another CA", "another peer", "another federation"],
)
@in_loop
async def test_what_is_wrong_there(tmp_path: Path, give_there: Callable[[Path], Path], text: str, remedy: str) -> None:
    own = Tls(give(tmp_path / "0", OURS, "one", 0), "one", 0)
    found = await described(give_there(tmp_path / "1"), own)
    assert found is not None
    assert found.text.startswith(text)
    assert found.remedy.startswith(remedy)


@in_loop
async def test_whose_certificate_is_refused(tmp_path: Path) -> None:
    folder = give(tmp_path / "0", OURS, "one", 0)
    own = Tls(folder, "one", 0)
    there = give(tmp_path / "1", OURS, "one", 1)
    other = give(tmp_path / "other", new_authority("one"), "one", 1)
    assert await described(there, own, trusts=there) is None
    found = await described(there, own, trusts=other)
    assert found is not None
    assert found.text.startswith("it refuses the certificate of this peer (")
    assert found.remedy.startswith("compare the CA's fingerprint with the site of peer 1")


@in_loop
async def test_this_peers_own_certificate_has_expired(tmp_path: Path) -> None:
    """It was good when it started."""
    own = Tls(give(tmp_path / "good", OURS, "one", 0), "one", 0)
    early = NOW - timedelta(days=20)
    authority = new_authority("one", early)
    own.credentials = load_credentials(give(tmp_path / "0", authority, "one", 0, early), "one", 0, early)
    there = give(tmp_path / "1", authority, "one", 1)
    found = await described(there, own, trusts=there)
    assert found is not None
    assert "which expired on" in found.text
    assert found.remedy == f"renew it here: 'crad-mesh certs renew --tls-dir {tmp_path / '0'}'"
