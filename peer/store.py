"""The state directory: own rounds, committed by a rename, and what has been received of others.

    lock                        held while a service runs
    federation.json             whose state this is: peer id and the agreed fields
    count-noise.key             secret of the noise on the class counts, if there is such noise
    rounds/000012/              snapshot.safetensors, checkpoint.safetensors, manifest.json, record.json
    received/000012/            3.json, 3.safetensors, and 3.partial while it is on its way
    manifests/000012.json       own rounds that are not kept any more, with partial participation (and passed.json)
    lineage.jsonl               manifests of rounds, own and received, that are not kept any more
    data.json                   class names, image shape and partition (or own images) with which this peer has trained
    images/                     own images as they are used, read and scaled once
    data-summary.json, .txt     what these came to, for the site's own people
    seen.json                   the newest snapshot of every other peer that has been here
    best.json                   the best round of those that everybody has published
    history.jsonl, result.json  for the user
    served.json                 other peers that have had all they need of this one
    conflicts/                  evidence against peers that showed different snapshots of one round
    refused-by.json             peers that did not use a round of this one, and why
    refused.txt                 calls of others that were refused, counted by caller and reason
    quarantine/                 of each peer the last snapshot that was refused, its manifest, and the reason
    set-aside/                  own rounds that --recover has replaced

A round directory appears under its name only when whole and durable. Rounds P and P-1 and the best one are kept. With
partial participation these are the last two that this peer had a part in, and all manifests stay: somebody who has been
away comes for them one by one.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from crad_p2p.durable import sync, write_file
from crad_p2p.errors import ConfigurationError, DataError, IncompleteError
from crad_p2p.failpoints import fail_point
from crad_p2p.federation import Federation, describe_difference
from crad_p2p.manifest import Manifest
from crad_p2p.participation import Part
from crad_p2p.privacy import KEY_FILE
from crad_p2p.results import BestRound, PeerResult, RoundRecord
from crad_p2p.snapshot import CHECKPOINT_FILE, SNAPSHOT_FILE, sha256_file
from peer.lineage import FILE as LINEAGE
from peer.lineage import Lineage
from peer.lock import Lock
from peer.quarantine import RefusedBy, forget_refused, is_refused, keep_aside, note_refused
from peer.witness import Conflict, Sighting

logger = logging.getLogger(__name__)

#: Pieces of evidence that are kept: a peer that lies in every manifest must not fill the disk.
_MOST_CONFLICTS = 200
MANIFEST = "manifest.json"
RECORD = "record.json"
PASSED = "passed.json"
_OWNER = "federation.json"


@dataclass(frozen=True)
class Outdated:
    """What nobody needs any more: own rounds, files that were received, and folders with nothing else in them."""

    rounds: tuple[int, ...]
    files: tuple[Path, ...]
    folders: tuple[Path, ...]


class Store:
    """Files of one peer. Methods block on the disk; the service calls those that write much in a thread."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._rounds = root / "rounds"
        self._received = root / "received"
        self._lock = Lock(root / "lock")
        self._lineage = Lineage(root / LINEAGE)
        self.refused_by = RefusedBy(root / "refused-by.json")
        self._manifests: dict[int, Manifest] = {}
        self._part: Part | None = None
        self._data: dict[str, Any] = {}

    @property
    def count_key(self) -> Path:
        """Where the secret of the noise on the class counts lies (or would lie)."""
        return self.root / KEY_FILE

    # --- opening ---------------------------------------------------------------------------------------------------

    def open(self, federation: Federation, peer_id: int) -> None:
        """Take the lock, check whose state this is, and clear away what a killed process left half done.

        Raises:
            AlreadyRunningError: another service holds the directory.
            ConfigurationError: the directory cannot be written, or belongs to another peer or federation.
        """
        try:
            self.root.parent.mkdir(parents=True, exist_ok=True)
            # For its owner alone: models, and exact counts where those that are published have noise. One that is
            # there already keeps the mode that somebody has given it.
            self.root.mkdir(mode=0o700, exist_ok=True)
            self._rounds.mkdir(exist_ok=True)
            self._received.mkdir(exist_ok=True)
            self._lock.take(
                f"peer {peer_id} is already running on state directory {self.root}",
                "end that process first",
            )
        except OSError as error:
            advice = "mend that" if self.kept_rounds() else "mend that, or choose another with --state-dir"
            raise ConfigurationError(
                f"state directory {self.root}: cannot be written ({error.filename or self.root}: {error.strerror}); "
                f"{advice}"
            ) from None
        self._part = federation.part_of(peer_id)
        if not self.check_owner(federation, peer_id):
            mine = {"peer": peer_id, "agreed": federation.agreed()}
            write_file(self.root / _OWNER, json.dumps(mine, indent=1) + "\n")
        for folder in (self._rounds, self._received):
            for kind in (".staging-*", ".old-*"):
                for leftover in folder.glob(kind):
                    shutil.rmtree(leftover)
        self._drop_torn_manifests()
        self._lineage.mend()

    def close(self) -> None:
        """Give the lock back."""
        self._lock.release()

    def holder(self) -> str | None:
        """The process that works in the directory, as :meth:`Lock.holder`."""
        return self._lock.holder()

    def check_owner(self, federation: Federation, peer_id: int) -> bool:
        """Whether the directory says whose it is. Changes nothing.

        Raises:
            ConfigurationError: it belongs to another peer or federation.
        """
        path = self.root / _OWNER
        if not path.exists():
            return False
        try:
            stored = json.loads(path.read_text())
            found = {"peer id": stored["peer"], **stored["agreed"]}
        except (ValueError, KeyError, TypeError):
            raise ConfigurationError(
                f"{path} is damaged; if the rounds beside it are this federation's, remove it and start again, "
                f"otherwise choose another --state-dir"
            ) from None
        expected = {"peer id": peer_id, **federation.agreed()}
        difference = describe_difference(found, expected, "the state directory", "the federation file")
        if difference and not self.kept_rounds():  # of a start that came to nothing, with another file perhaps
            return False
        if difference:
            raise ConfigurationError(
                f"state directory {self.root} belongs to another run: {difference}; continue with the same "
                f"settings, or choose another --state-dir"
            )
        return True

    def remember_data(self) -> None:
        """The data that :meth:`require_same_data` was told of are those of this run."""
        write_file(self.root / "data.json", json.dumps(self._data) + "\n")

    def require_same_data(self, data: Mapping[str, Any]) -> bool:
        """See that the data are those with which this peer began; remember them before its first round.

        Args:
            data: class names, image shape and digest of the partition, or of the own images.

        Returns:
            False if it is not known with what this peer began: its disk was lost.

        Raises:
            DataError: they are not.
            ConfigurationError: what was remembered is damaged.
        """
        path, self._data = self.root / "data.json", dict(data)
        if self.last_round() < 0:  # round 0 has counts, which must not change any more
            self.remember_data()
        try:
            before = json.loads(path.read_text())
            if not isinstance(before, dict):
                raise ValueError
        except FileNotFoundError:
            return False
        except ValueError:
            raise ConfigurationError(
                f"{path} is damaged; if the data set is that with which the rounds beside it were trained, remove it "
                f"and start again"
            ) from None
        if difference := describe_difference(before, dict(data), "the rounds before this start", "the data set now"):
            raise DataError(
                f"the data are not those with which this peer trained its rounds in {self.root}: {difference}; put the "
                f"data set back, or begin a new run"
            )
        return True

    # --- own rounds ------------------------------------------------------------------------------------------------

    def last_round(self) -> int:
        """Highest committed round, -1 for none."""
        return max(self.kept_rounds(), default=-1)

    def kept_rounds(self) -> list[int]:
        """All committed rounds that are here, ascending."""
        return sorted(_numbered(self._rounds))

    def check_rounds(self) -> None:
        """See that all committed rounds are whole.

        Raises:
            IncompleteError: one is damaged, by a failing disk or by hand.
        """
        for number in self.kept_rounds():
            if reason := self.damage(number):
                raise self.damaged(number, reason)

    def damaged(self, number: int, reason: str) -> IncompleteError:
        """What to say of a committed round that is damaged."""
        return IncompleteError(
            f"{self.round_dir(number)} is damaged ({reason}); start with --recover to fetch this peer's last rounds "
            f"back from the others, or put back a copy of the directory"
        )

    def damage(self, number: int) -> str | None:
        """What is wrong with the files of a committed round, if anything is."""
        folder = self.round_dir(number)
        try:
            manifest = self.manifest(number)
            if sha256_file(folder / SNAPSHOT_FILE) != manifest.sha256:
                return f"{SNAPSHOT_FILE} does not have the digest that {MANIFEST} says"
            digest = self._committed_record(number)[1]
            # Training goes on from the last round alone; of an older one only the model is still wanted.
            if number == self.last_round() and sha256_file(folder / CHECKPOINT_FILE) != digest:
                return f"{CHECKPOINT_FILE} does not have the digest that {RECORD} says"
        except OSError as error:
            return f"{Path(error.filename).name if error.filename else folder.name}: {error.strerror}"
        except (ValueError, TypeError, KeyError) as error:
            return f"{MANIFEST} or {RECORD}: {error}"
        return None

    def busy_seconds(self) -> float:
        """For how long this peer worked for its last round, waiting left out; 0 if there is none."""
        number = self.last_round()
        if number < 1:
            return 0.0
        seconds = self._committed_record(number)[0].seconds
        return seconds.teachers + seconds.train + seconds.validate

    def round_dir(self, number: int) -> Path:
        """Where a committed round lies (or would lie)."""
        return self._rounds / f"{number:06d}"

    def staging_dir(self, number: int) -> Path:
        """An empty directory for the files of a round that is not committed yet.

        Its name is new each time: a learner whose service was killed may still be about to write to an older one.
        """
        for older in self._rounds.glob(f".staging-{number:06d}-*"):
            shutil.rmtree(older)
        path = self._rounds / f".staging-{number:06d}-{os.getpid()}-{time.monotonic_ns()}"
        path.mkdir()
        return path

    def scratch_dir(self) -> Path:
        """A path for a learner's scratch folder, new for the same reason; older ones are deleted."""
        folder = self.root / "scratch"
        shutil.rmtree(folder, ignore_errors=True)
        return folder / f"{os.getpid()}-{time.monotonic_ns()}"

    def manifest(self, number: int) -> Manifest:
        """Manifest of a committed round.

        Raises:
            FileNotFoundError: the round is not kept (any more).
        """
        if number not in self._manifests:  # read once; every other peer asks for it
            kept, old = self.round_dir(number), self._old_manifest(number)
            path = old if old.exists() and not kept.exists() else kept / MANIFEST
            self._manifests[number] = Manifest.from_bytes(path.read_bytes())
        return self._manifests[number]

    def _old_manifest(self, number: int) -> Path:
        return self.root / "manifests" / f"{number:06d}.json"

    def signed_rounds(self) -> list[int]:
        """All own rounds whose manifest is here, ascending."""
        old = (int(path.stem) for path in self.root.glob("manifests/*.json") if path.stem.isdecimal())
        return sorted({*old, *self.kept_rounds()})

    def passed(self) -> int:
        """The last round, if this peer has collected it, and had no part in it; else -1."""
        try:
            number = json.loads((self.root / PASSED).read_text())
        except FileNotFoundError:
            return -1
        except ValueError:
            number = None
        if not isinstance(number, int):
            raise IncompleteError(f"{self.root / PASSED} is damaged; remove it and start again")
        return number

    def save_passed(self, number: int) -> None:
        """Remember durably that all rounds up to this one are over: their manifests may not be had for ever."""
        write_file(self.root / PASSED, f"{number}\n")

    def replace_manifest(self, manifest: Manifest) -> None:
        """Put another signature under a committed round; all else of its manifest is as it was."""
        kept = self.round_dir(manifest.round)
        write_file(kept / MANIFEST if kept.exists() else self._old_manifest(manifest.round), manifest.to_bytes())
        self._manifests[manifest.round] = manifest

    def commit(self, staging: Path, manifest: Manifest, record: RoundRecord) -> None:
        """Make a round durable, then visible: the rename is the commit point.

        ``record`` gets the seconds that the bulk of the files took to become durable.

        Raises:
            IncompleteError: the disk is full or failed; the last committed round is untouched.
        """
        start, number = time.monotonic(), manifest.round
        fail_point("commit-begun", number)
        try:
            self._make_consumed_durable(manifest)
            for path in sorted(staging.iterdir()):
                _fsync(path, number)
            seconds = replace(record.seconds, commit=time.monotonic() - start)
            for name, content in (
                (MANIFEST, manifest.to_bytes()),
                (RECORD, _record_document(replace(record, seconds=seconds), sha256_file(staging / CHECKPOINT_FILE))),
            ):
                (staging / name).write_bytes(content)
                _fsync(staging / name, number)
            _fsync(staging, number, "staging")
            staging.rename(self.round_dir(number))
            fail_point("after-rename", number)
            _fsync(self._rounds)
            fail_point("after-fsync-rounds", number)
        except OSError as error:
            raise IncompleteError(
                f"round {manifest.round} could not be written to {self.root} ({error.strerror}); all earlier "
                f"rounds are safe: mend the disk and start the same command again to continue"
            ) from None

    def copy_round(self, number: int, again: int) -> Path:
        """Model and checkpoint of a committed round, in an empty directory for round ``again``."""
        staging = self.staging_dir(again)
        for name in (SNAPSHOT_FILE, CHECKPOINT_FILE):
            try:
                os.link(self.round_dir(number) / name, staging / name)
            except OSError:  # not every file system has hard links
                shutil.copyfile(self.round_dir(number) / name, staging / name)
        return staging

    def set_aside(self, number: int) -> None:
        """Move a round that is damaged, or that others know with other bytes, out of the way."""
        if not self.round_dir(number).exists():
            return
        folder = self.root / "set-aside"
        folder.mkdir(exist_ok=True)
        goal = folder / f"{number:06d}-{time.time_ns()}"
        self._lineage.append(_documents([self.round_dir(number) / MANIFEST]))  # an operator may delete the folder
        self.round_dir(number).rename(goal)
        self._manifests.pop(number, None)
        logger.info("round %d as it was here is kept in %s", number, goal)

    def outdated(self, keep: Iterable[int], received_from: int) -> Outdated:
        """Own rounds other than ``keep``, and what was received before ``received_from``; looks at names alone.

        The two newest snapshots of every other peer stay, however old: with those it can replace a disk that it lost.
        Before :meth:`delete`, :meth:`keep_lineage` keeps the manifests. With partial participation none of them goes,
        and what was received stays from each peer's version as of round ``received_from`` on.
        """
        part = self._part

        def is_old(path: Path, number: int) -> bool:
            """Whether it belongs to a version that is older than what may be needed."""
            owner = path.name.partition(".")[0]
            is_peer = part is not None and owner.isdecimal() and int(owner) in part.schedule.ids
            first = part.version(int(owner), received_from) if part is not None and is_peer else received_from
            return number < first

        rounds = sorted(set(self.kept_rounds()) - set(keep))
        files: list[Path] = []
        folders: list[Path] = []
        kept_of = Counter[str]()
        for number, folder in sorted(_numbered(self._received).items(), reverse=True):
            whole = {path.stem for path in folder.glob("*.safetensors") if path.with_suffix(".json").exists()}
            newest = {peer for peer in whole if kept_of[peer] < 2}
            kept_of.update(newest)
            if number >= received_from:
                continue
            for path in sorted(folder.iterdir()):
                is_kept = part is not None and (path.suffix == ".json" or not is_old(path, number))
                if not is_kept and (path.stem not in newest or path.suffix not in (".json", ".safetensors")):
                    files.append(path)
            if not newest and part is None:
                folders.append(folder)
        return Outdated(tuple(rounds), tuple(files), tuple(folders))

    def keep_lineage(self, outdated: Outdated) -> None:
        """Bring the manifests of what is about to be deleted into lineage.jsonl, durably. Waits for the disk.

        Raises:
            OSError: the disk is full or failed; nothing must be deleted then.
        """
        paths = [self.round_dir(number) / MANIFEST for number in outdated.rounds]
        self._lineage.append(_documents(paths + [path for path in outdated.files if path.suffix == ".json"]))
        if self._part is not None and outdated.rounds:
            (self.root / "manifests").mkdir(exist_ok=True)
            for number in outdated.rounds:
                write_file(self._old_manifest(number), self.manifest(number).to_bytes())

    def delete(self, outdated: Outdated) -> None:
        """Delete what has been found outdated."""
        for number in outdated.rounds:
            if self._part is None:
                self._manifests.pop(number, None)
            _delete(self.round_dir(number))
        for path in outdated.files:
            path.unlink()
        for folder in outdated.folders:
            folder.rmdir()

    # --- received rounds -------------------------------------------------------------------------------------------

    def save_received_manifest(self, manifest: Manifest) -> None:
        """Keep a peer's checked manifest. Not made durable: until it is used it can be fetched again."""
        path = self.received_manifest_path(manifest.peer, manifest.round)
        path.parent.mkdir(exist_ok=True)
        self._lineage.append(each for each in _documents([path]) if each != manifest.to_bytes())  # one that it replaces
        partial = path.with_suffix(".json.partial")
        partial.write_bytes(manifest.to_bytes())
        fail_point("manifest-received", manifest.round)
        partial.rename(path)
        forget_refused(self.received_snapshot_path(manifest.peer, manifest.round), manifest)
        fail_point("manifest-renamed", manifest.round)

    def _make_consumed_durable(self, manifest: Manifest) -> None:
        """A round that names a snapshot must not outlast the manifest of it, or its lineage would have a gap."""
        used = [(each.peer, each.round) for each in manifest.consumed]
        paths = [path for path in (self.received_manifest_path(*each) for each in used) if path.exists()]
        for path in paths:
            _fsync(path)
        for folder in {path.parent for path in paths}:
            _fsync(folder)
        if paths:
            _fsync(self._received)

    def _drop_torn_manifests(self) -> None:
        """They were not made durable, so a power cut may have left a part of one under its name, or zeros."""
        for path in self._received.glob("*/*.json"):
            try:
                Manifest.from_bytes(path.read_bytes())
            except ValueError as error:
                logger.info("%s is torn and will be fetched again (%s)", path, error)
                path.unlink()

    def received_rounds(self, peer: int) -> list[int]:
        """Rounds of which a manifest of a peer is here, ascending."""
        return sorted(number for number, path in _numbered(self._received).items() if (path / f"{peer}.json").exists())

    def received_manifest(self, peer: int, number: int) -> Manifest:
        """A peer's manifest that has been checked and kept.

        Raises:
            FileNotFoundError: it is not here (any more), or a power cut has left nothing of use in its file.
        """
        path = self.received_manifest_path(peer, number)
        try:
            return Manifest.from_bytes(path.read_bytes())
        except ValueError:
            raise FileNotFoundError(f"{path} is damaged") from None

    def newest_received(self, peer: int, up_to: int | None = None) -> Manifest | None:
        """The newest manifest of a peer that is here, of rounds up to the given one."""
        for number in reversed(self.received_rounds(peer)):
            if up_to is None or number <= up_to:
                with suppress(FileNotFoundError):
                    return self.received_manifest(peer, number)
        return None

    def make_received_durable(self, peer: int, number: int) -> None:
        """What is here of a peer's round will outlast a power cut."""
        for path in (self.received_manifest_path(peer, number), self.received_snapshot_path(peer, number)):
            if path.exists():
                _fsync(path)
        _fsync(self._received_dir(number))
        _fsync(self._received)

    def quarantine(self, manifest: Manifest, reason: str) -> str:
        """Keep a refused snapshot of a peer until a later one is refused; says what is kept, as :func:`keep_aside`."""
        received = self.received_snapshot_path(manifest.peer, manifest.round)
        return keep_aside(self.root / "quarantine", received, manifest, reason)

    def note_refused(self, peer: int, number: int, reason: str) -> None:
        """Remember that a peer's manifest of a round was refused, until another one is accepted."""
        note_refused(self.received_snapshot_path(peer, number), reason)

    def is_refused(self, manifest: Manifest) -> bool:
        """Whether these bytes of a peer came as announced, and must not be used."""
        return is_refused(self.received_snapshot_path(manifest.peer, manifest.round), manifest)

    def refused(self, number: int) -> list[int]:
        """Peers whose manifest or snapshot of a round was refused, ascending.

        With partial participation of any round: what a peer that trains with nobody refuses is in no line of history.
        """
        folders = [self._received_dir(number)] if self._part is None else _numbered(self._received).values()
        return sorted({int(path.stem) for folder in folders for path in folder.glob("*.refused")})

    def received_manifest_path(self, peer: int, number: int) -> Path:
        return self._received_dir(number) / f"{peer}.json"

    def received_snapshot_path(self, peer: int, number: int) -> Path:
        """Final place of a checked snapshot; ``.partial`` takes its suffix until then."""
        return self._received_dir(number) / f"{peer}.safetensors"

    def _received_dir(self, number: int) -> Path:
        return self._received / f"{number:06d}"

    # --- what has been seen of others ------------------------------------------------------------------------------

    def load_seen(self) -> dict[int, Sighting]:
        """The newest snapshot of every other peer that has been here.

        Raises:
            IncompleteError: the file is damaged.
        """
        path = self.root / "seen.json"
        if not path.exists():
            return {}
        try:
            return {int(peer): Sighting(**seen) for peer, seen in json.loads(path.read_text()).items()}
        except (ValueError, TypeError, AttributeError):
            raise IncompleteError(
                f"{path} is damaged; it holds which rounds of the other peers were here. Put back a copy, or remove it "
                f"to go on without this memory"
            ) from None

    def save_seen(self, sightings: dict[int, Sighting]) -> None:
        """Remember durably."""
        document = {str(peer): asdict(seen) for peer, seen in sorted(sightings.items())}
        write_file(self.root / "seen.json", json.dumps(document) + "\n")
        fail_point("seen-durable", max(seen.round for seen in sightings.values()))

    def save_conflict(self, conflict: Conflict, documents: dict[str, str]) -> Path:
        """Keep evidence: the conflict, and the manifests that speak of it. The first of a (peer, round) stays."""
        folder = self.root / "conflicts"
        folder.mkdir(exist_ok=True)
        path = folder / f"peer-{conflict.peer}-round-{conflict.round}.json"
        if not path.exists() and len(self.conflicts()) < _MOST_CONFLICTS:
            write_file(path, json.dumps({**asdict(conflict), "manifests": documents}, indent=1) + "\n")
        return path

    def conflicts(self) -> list[Path]:
        """All evidence that is kept."""
        return sorted((self.root / "conflicts").glob("*.json"))

    # --- best round and history ------------------------------------------------------------------------------------

    def load_best(self) -> BestRound:
        """The best round as it was last saved.

        Raises:
            IncompleteError: the file is damaged.
        """
        path = self.root / "best.json"
        try:
            best = BestRound(**json.loads(path.read_text())) if path.exists() else BestRound()
            if not isinstance(best.round, int | None) or not isinstance(best.accuracy, float | int | None):
                raise TypeError(f"{best}")
            return best
        except (ValueError, TypeError):
            raise IncompleteError(
                f"{path} is damaged; put back a copy, or remove it: the best round is then chosen among those to come"
            ) from None

    def load_served(self) -> set[int]:
        """Other peers that have said that they have all they need of this one.

        Raises:
            IncompleteError: the file is damaged.
        """
        path = self.root / "served.json"
        try:
            return set(map(int, json.loads(path.read_text()))) if path.exists() else set()
        except (ValueError, TypeError):
            raise IncompleteError(f"{path} is damaged; remove it, and the others are served once more") from None

    def save_served(self, peers: set[int]) -> None:
        """Remember that durably."""
        write_file(self.root / "served.json", json.dumps(sorted(peers)) + "\n")

    def save_best(self, best: BestRound) -> None:
        write_file(self.root / "best.json", json.dumps(asdict(best)) + "\n")

    def save_result(self, result: PeerResult) -> None:
        """Write result.json: this peer's entry for summary.json."""
        write_file(self.root / "result.json", json.dumps(asdict(result), indent=1) + "\n")

    def has_result(self) -> bool:
        """Whether this peer has finished once."""
        return (self.root / "result.json").exists()

    def result(self) -> PeerResult | None:
        """This peer's result; None before its last round."""
        path = self.root / "result.json"
        if not path.exists():
            return None
        return PeerResult.from_json(json.loads(path.read_text()))

    def _committed_record(self, number: int) -> tuple[RoundRecord, str]:
        """What was committed with a round beside its manifest: its line of the history, and its checkpoint's sha256."""
        document = json.loads((self.round_dir(number) / RECORD).read_text())
        try:
            return RoundRecord.from_line(json.dumps(document["record"])), document["checkpoint_sha256"]
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{RECORD} of round {number}: {error!r}") from None

    def record_history(self) -> None:
        """Bring history.jsonl up to the last committed round.

        The line of a round is committed with it; a process killed after the rename and before the append left it out.

        Raises:
            IncompleteError: the file is damaged.
        """
        path = self.root / "history.jsonl"
        text = path.read_bytes() if path.exists() else b""
        whole = text[: text.rfind(b"\n") + 1]  # a killed process can leave half a line
        lines = whole.splitlines()
        last = _history_line(path, len(lines), lines[-1]).round if lines else 0
        if whole != text:
            write_file(path, whole)
        missing = [number for number in self.kept_rounds() if number > last]
        if not missing:
            return
        with path.open("a") as file:
            for number in missing:
                record, _ = self._committed_record(number)
                own = {each for each in range(last + 1, number) if self._part is None or self._part.is_active(each)}
                if lost := sorted(own - set(record.skipped_rounds)):
                    logger.warning("%s has no lines for rounds %d to %d, which are lost", path, lost[0], lost[-1])
                file.write(record.to_line())
                last = number
            file.flush()
            os.fsync(file.fileno())  # the round it was copied from will be deleted

    def rewind_history(self) -> None:
        """After rounds have been replaced: drop the lines of those that do not count any more."""
        path, records = self.root / "history.jsonl", self.history()
        digests = {number: self.manifest(number).sha256 for number in self.kept_rounds()}
        last = self.last_round()
        kept = [
            record
            for record in records
            if record.round <= last and digests.get(record.round, record.snapshot_sha256) == record.snapshot_sha256
        ]
        if kept != records:
            write_file(path, "".join(record.to_line() for record in kept))

    def history(self) -> list[RoundRecord]:
        """All rounds of this peer, ascending; half a line at the end, as a killed process leaves it, is left out.

        Raises:
            IncompleteError: a line is damaged; says which.
        """
        path = self.root / "history.jsonl"
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        return [_history_line(path, number, line) for number, line in enumerate(lines, start=1)]


def _documents(paths: Iterable[Path]) -> list[bytes]:
    """The manifests in these files, a line of JSON each; one that is not there, or torn, is left out."""
    found = []
    for path in paths:
        try:
            document = path.read_bytes()
            manifest = Manifest.from_bytes(document)
        except FileNotFoundError:
            continue
        except ValueError as error:
            logger.warning("%s is damaged and will be missing in %s (%s)", path, LINEAGE, error)
            continue
        found.append(manifest.to_bytes() if b"\n" in document else document)
    return found


def _record_document(record: RoundRecord, checkpoint_sha256: str) -> bytes:
    return json.dumps({"checkpoint_sha256": checkpoint_sha256, "record": json.loads(record.to_line())}).encode()


def _history_line(path: Path, number: int, line: bytes) -> RoundRecord:
    try:
        return RoundRecord.from_line(line.decode())
    except (ValueError, TypeError, KeyError, AttributeError):
        raise IncompleteError(f"{path} is damaged in line {number}; put back a copy, or remove that line") from None


def _numbered(folder: Path) -> dict[int, Path]:
    """The directories named by a round; an operator may have put others beside them."""
    try:
        return {int(path.name): path for path in folder.iterdir() if path.name.isdecimal() and path.is_dir()}
    except (FileNotFoundError, NotADirectoryError):
        return {}


def _delete(folder: Path) -> None:
    """Remove a directory so that nothing of it is ever seen without the rest, should this process be killed midway."""
    hidden = folder.with_name(f".old-{folder.name}")
    folder.rename(hidden)
    shutil.rmtree(hidden)


def _fsync(path: Path, number: int | None = None, name: str = "") -> None:
    """Make a file's bytes or a directory's names durable; with a fail point before and after in round ``number``."""
    if number is not None:
        fail_point(f"before-fsync-{name or path.name}", number)
    sync(path)
    if number is not None:
        fail_point(f"after-fsync-{name or path.name}", number)
