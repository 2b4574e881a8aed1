"""Own rounds: signed with the certificate of now, made durable, and then shown to the others."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from crad_p2p.manifest import Manifest
from crad_p2p.results import RoundRecord
from peer.intake import document_digest
from peer.signatures import is_signed_with, sign_manifest
from peer.status import Status
from peer.store import Store
from peer.tls import Tls
from peer.waiting import to_the_end

logger = logging.getLogger(__name__)


class Publisher:
    """Of one peer; without ``tls`` nothing is signed."""

    def __init__(self, store: Store, status: Status, tls: Tls | None) -> None:
        self._store = store
        self._status = status
        self._tls = tls
        self._is_writing = False  # a round of which nobody else may know yet

    async def write(self, folder: Path, manifest: Manifest, record: RoundRecord) -> Manifest:
        """Commit a round with its signed manifest, which is returned; nobody is told of it yet.

        Raises:
            IncompleteError: the disk is full or failed; the last committed round is untouched.
        """
        signed = self._signed(manifest)
        self._is_writing = True
        try:
            await to_the_end(asyncio.to_thread(self._store.commit, folder, signed, record))
        finally:
            self._is_writing = False
        self.sign_again()  # should there have been a new certificate meanwhile
        return self._store.manifest(manifest.round)

    def sign_again(self) -> None:
        """Sign the kept rounds with the certificate of now: the CA of the one before may be dropped any time."""
        if self._tls is None:
            return
        for number in self._store.signed_rounds():
            manifest = self._store.manifest(number)
            if not is_signed_with(manifest, self._tls.credentials):
                logger.info("round %d is signed again, with the certificate of now", number)
                self._store.replace_manifest(self._signed(manifest))

    def renew(self) -> None:
        """This peer has a new certificate; a round that is just being written is signed and shown when it is there."""
        if not self._is_writing:
            self.sign_again()
            self._show_manifest()

    def show(self, busy: float = 0.0, global_accuracy: float | None = None) -> None:
        """Let the others see the last committed round, if there is one.

        Args:
            busy: seconds that this peer worked for it, waiting left out.
        """
        number = self._store.last_round()
        if number < 0:
            return
        self._show_manifest()
        known = {} if global_accuracy is None else {"global_accuracy": global_accuracy}
        self._status.update(
            round=number,
            busy_seconds=busy,
            validation_accuracy=self._store.manifest(number).statistics.accuracy,
            **known,
        )

    def _show_manifest(self) -> None:
        number = self._store.last_round()
        if number < 0:
            return
        document = self._store.manifest(number).to_bytes()
        self._status.update(manifest=document, manifest_sha256=document_digest(document))

    def _signed(self, manifest: Manifest) -> Manifest:
        return manifest if self._tls is None else sign_manifest(manifest, self._tls.credentials)
