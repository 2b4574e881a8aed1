"""An own round is public when it is durable, and signed with the certificate that is in use then."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from wire import PEER, federation, manifest_of

from crad_p2p.durable import write_file
from crad_p2p.errors import IncompleteError
from crad_p2p.manifest import Manifest
from crad_p2p.results import RoundRecord
from crad_p2p.snapshot import CHECKPOINT_FILE, SNAPSHOT_FILE
from launch.authority import key_to_pem, make_request, new_authority, new_key, sign_request, to_pem
from peer.publishing import Publisher
from peer.signatures import is_signed_with
from peer.status import Status
from peer.store import MANIFEST, Store
from peer.tls import Tls

NAME = federation(1).federation


class Here:
    """A peer with round 0, which is shown."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder / "tls"
        self.folder.mkdir()
        self.new_certificate()
        self.tls = Tls(self.folder, NAME, PEER)
        self.store = Store(folder / "state")
        self.store.open(federation(1), PEER)
        self.status = Status()
        self.publisher = Publisher(self.store, self.status, self.tls)
        asyncio.run(self.write(0))
        self.publisher.show()
        self.monkeypatch = monkeypatch

    def new_certificate(self) -> None:
        authority, key = new_authority(NAME), new_key()
        write_file(self.folder / "ca.pem", to_pem(authority.certificate))
        write_file(self.folder / "peer.key", key_to_pem(key), 0o600)
        write_file(self.folder / "peer.pem", to_pem(sign_request(authority, make_request(key, NAME, PEER), PEER)))

    def shown(self) -> Manifest:
        return Manifest.from_bytes(self.status.state.manifest)

    async def write(self, number: int) -> Manifest:
        staging = self.store.staging_dir(number)
        for name in (SNAPSHOT_FILE, CHECKPOINT_FILE):
            (staging / name).write_bytes(b"of the learner")
        record = RoundRecord(peer=PEER, round=number, snapshot_sha256="", validation_accuracy=0.5)
        return await self.publisher.write(staging, manifest_of(number), record)

    def renew_while_writing(self, when: str) -> None:
        """There is a new certificate just before or just after a round gets its name, and the loop hears of it then."""
        loop, real = asyncio.get_running_loop(), Store.commit

        def renewed(store: Store, *arguments: Any) -> None:
            if when == "after":
                real(store, *arguments)
            self.new_certificate()
            assert self.tls.reload()
            heard = asyncio.run_coroutine_threadsafe(self.hear_of_it(), loop)
            assert heard.result(10) == 0  # the round that is shown
            if when == "before":
                real(store, *arguments)

        self.monkeypatch.setattr(Store, "commit", renewed)

    async def hear_of_it(self) -> int:
        self.publisher.renew()
        return self.shown().round


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Here:
    return Here(tmp_path, monkeypatch)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_certificate_that_comes_while_a_round_is_written(here: Here, when: str) -> None:
    async def run() -> Manifest:
        here.renew_while_writing(when)
        return await here.write(1)

    before = here.tls.credentials
    written = asyncio.run(run())
    assert here.tls.credentials != before
    assert here.store.kept_rounds() == [0, 1]
    for number in (0, 1):
        kept = Manifest.from_bytes((here.store.round_dir(number) / MANIFEST).read_bytes())
        assert is_signed_with(kept, here.tls.credentials)
        assert kept == here.store.manifest(number)
    assert written == here.store.manifest(1)
    assert here.shown().round == 0
    here.publisher.show()
    assert here.shown() == written


def test_a_certificate_that_comes_between_rounds_is_shown_at_once(here: Here) -> None:
    here.new_certificate()
    assert here.tls.reload()
    here.publisher.renew()
    assert here.shown() == here.store.manifest(0)
    assert is_signed_with(here.shown(), here.tls.credentials)


def test_a_round_that_could_not_be_written_does_not_keep_the_others_from_being_signed(here: Here) -> None:
    def full(*_: Any) -> None:
        raise IncompleteError("the disk is full")

    here.monkeypatch.setattr(Store, "commit", full)
    with pytest.raises(IncompleteError):
        asyncio.run(here.write(1))
    here.new_certificate()
    assert here.tls.reload()
    here.publisher.renew()
    assert is_signed_with(here.shown(), here.tls.credentials)
