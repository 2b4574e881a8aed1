"""A greeting or manifest proves one peer, to one caller, for one nonce; whoever else signs is refused and named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import Encoding
from wire import ME, PEER, manifest_of

from crad_p2p.manifest import Manifest
from launch.authority import throwaway
from peer.credentials import Credentials, load_credentials
from peer.signatures import check_greeting, check_signature, sign_greeting, sign_manifest

NAME, NONCE, OTHER = "link-test", bytes(range(32)), 2


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Credentials]:
    folder = tmp_path_factory.mktemp("tls")
    throwaway(folder, NAME, [ME, PEER, OTHER])
    return {peer: load_credentials(folder / str(peer), NAME, peer) for peer in (ME, PEER, OTHER)}


def check(shown: Credentials, proof: bytes, **changes: Any) -> None:
    """What ME does with the answer of one that should be PEER."""
    check_greeting(
        shown.certificate.public_bytes(Encoding.DER),
        proof,
        **{
            "federation": NAME,
            "authorities": shown.authorities,
            "caller": ME,
            "called": PEER,
            "nonce": NONCE,
            **changes,
        },
    )


def test_a_greeting_of_the_called_peer(members: dict[int, Credentials]) -> None:
    check(members[PEER], sign_greeting(members[PEER], ME, NONCE))


def test_another_member_with_a_certificate_of_its_own_is_named(members: dict[int, Credentials]) -> None:
    """It signs what the called peer would have signed, with the key that belongs to what it shows."""
    liar = replace(members[OTHER], peer=PEER)
    with pytest.raises(ValueError, match=r"^its certificate is that of peer 2, expected peer 1$"):
        check(liar, sign_greeting(liar, ME, NONCE))


@pytest.mark.parametrize(
    "proof",
    [
        lambda _: b"",
        lambda own: sign_greeting(own, OTHER, NONCE),
        lambda own: sign_greeting(own, ME, NONCE[::-1]),
        lambda own: sign_greeting(replace(own, peer=OTHER), ME, NONCE),
    ],
    ids=["none", "for another caller", "for another nonce", "as another peer"],
)
def test_a_proof_of_something_else(members: dict[int, Credentials], proof: Callable[[Credentials], bytes]) -> None:
    with pytest.raises(ValueError, match="does not fit the signature"):
        check(members[PEER], proof(members[PEER]))


def test_a_certificate_without_its_key(members: dict[int, Credentials]) -> None:
    with pytest.raises(ValueError, match="does not fit the signature"):
        check(members[PEER], sign_greeting(replace(members[OTHER], peer=PEER), ME, NONCE))


def test_a_certificate_of_another_federation(members: dict[int, Credentials]) -> None:
    with pytest.raises(ValueError, match="is for peer 1 of federation 'link-test'; expected federation 'one'"):
        check(members[PEER], sign_greeting(members[PEER], ME, NONCE), federation="one")


def test_a_manifest_of_its_peer(members: dict[int, Credentials]) -> None:
    check_signature(sign_manifest(manifest_of(3), members[PEER]), NAME, members[ME].authorities)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda signed, other: sign_manifest(signed, other), "manifest of peer 1 is signed by peer 2"),
        (
            lambda signed, _: signed.model_copy(update={"signature": None}),
            "of round 3 of peer 1 is not signed",
        ),
        (lambda signed, _: signed.model_copy(update={"round": 4, "model_round": 4}), "does not fit the signature"),
    ],
    ids=["another member", "nobody", "another round"],
)
def test_a_manifest_that_its_peer_did_not_sign(
    members: dict[int, Credentials], change: Callable[[Manifest, Credentials], Manifest], words: str
) -> None:
    signed = sign_manifest(manifest_of(3), members[PEER])
    with pytest.raises(ValueError, match=words):
        check_signature(change(signed, members[OTHER]), NAME, members[ME].authorities)
