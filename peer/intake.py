"""The one place where bytes of another institution come in: its manifest and its snapshot file, checked before use.

After these checks a snapshot has exactly the tensors of its announced architecture and the announced digest; the
learner checks the values (``crad_p2p.weights``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from crad_p2p.federation import Federation
from crad_p2p.foreign import printable
from crad_p2p.manifest import Manifest
from crad_p2p.snapshot import Layout, SnapshotError, check_file, largest_file


def document_digest(document: bytes) -> str:
    """What goes with a manifest on its way, so that a flipped bit cannot turn one count into another."""
    return hashlib.sha256(document).hexdigest()


class Intake:
    """Checks for one federation.

    Args:
        layouts: of every architecture of the federation, as the learner reports them.
        classes: length of the class statistics.
    """

    def __init__(self, federation: Federation, layouts: Mapping[str, Layout], classes: int) -> None:
        self._federation = federation
        self._digest = federation.digest()
        self._layouts = layouts
        self._classes = classes

    def manifest(self, document: bytes, peer: int, number: int, *, sha256: str | None = None) -> Manifest:
        """Parse a peer's manifest of the round that was asked for.

        Args:
            sha256: of the document, as its sender gave it; None if the document did not travel.

        Raises:
            SnapshotError: it is damaged, malformed, or of another run, peer, round, architecture, size or number of
                classes.
        """
        if sha256 is not None and document_digest(document) != sha256:
            raise SnapshotError(f"manifest has sha256 {document_digest(document)}, its sender gave {printable(sha256)}")
        try:
            manifest = Manifest.from_bytes(document)
        except ValueError as error:
            raise SnapshotError(str(error)) from None
        arch = self._federation.peer(peer).arch
        expected = {"run": self._digest, "peer": peer, "round": number, "arch": arch}
        for name, value in expected.items():
            if getattr(manifest, name) != value:
                raise SnapshotError(f"manifest says {name} {getattr(manifest, name)}, expected {value}")
        if len(manifest.statistics.counts) != self._classes:
            found = len(manifest.statistics.counts)
            raise SnapshotError(f"manifest has statistics of {found} classes, expected {self._classes}")
        named = {each.peer for each in manifest.consumed} | {*manifest.missing, *manifest.quarantined}
        if strangers := sorted(named - {*self._federation.ids} | named & {peer}):
            raise SnapshotError(f"manifest names {strangers} as teachers, expected other peers of the federation")
        if late := [each.round for each in manifest.consumed if each.round >= number]:
            raise SnapshotError(f"manifest names teachers of round {max(late)}, expected rounds before {number}")
        if manifest.size > largest_file(self._layouts[arch]):
            raise SnapshotError(f"manifest announces {manifest.size} bytes, more than {arch} can have")
        return manifest

    def snapshot(self, path: Path, manifest: Manifest) -> None:
        """Check a complete file against its manifest; reads all of it.

        Raises:
            SnapshotError: says what differs.
        """
        check_file(path, self._layouts[manifest.arch], size=manifest.size, sha256=manifest.sha256)
