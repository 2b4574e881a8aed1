"""``crad-mesh audit``: reads every manifest in state directories, and says what they prove.

Whatever lies there may have been put there by anybody: files are read up to a limit, and nothing of them reaches the
terminal but what has been checked or made printable.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from rich import box
from rich.console import Console
from rich.table import Table

from crad_p2p.errors import AuditError, ConfigurationError, UsageError
from crad_p2p.federation import FEDERATION_NAME, digest_of
from crad_p2p.foreign import printable
from crad_p2p.lines import fold
from crad_p2p.manifest import MAX_BYTES, Manifest
from crad_p2p.participation import Schedule, drawn_schedule
from crad_p2p.snapshot import SNAPSHOT_FILE, sha256_file
from launch.lineage import Entry, File, Lineage, Owner, Report, Run, ancestry, audit, misfit
from peer.certificates import ForeignIssuerError, fingerprint, name_text
from peer.credentials import CA_FILE, load_authorities
from peer.signatures import Authorities, check_signature

_OWNER: Final = "federation.json"
#: Findings that are printed.
_SHOWN: Final = 20
#: Numbers that are drawn to know who took part: a damaged file must not keep an audit busy.
_MOST_DRAWS: Final = 10_000_000
#: Characters that a table may take where no terminal limits it.
_WIDE: Final = 1_000
#: Bytes of a federation.json, of a piece of evidence (with two manifests in it), and of a line of history.
_MAX_DOCUMENT: Final = 4 * MAX_BYTES
_ADVICE: Final = "give a peer's state directory, or the --out directory of 'crad-mesh up'"


def show(console: Console, directory: Path, ca: Path | None, model: str | None) -> None:
    """Audit a directory and print what is found.

    Raises:
        UsageError: no state directory is there, no CA is given, or the model is no file.
        ConfigurationError: it cannot be told of which run the directory is.
        CertificateError: the CA's file is not one.
        AuditError: something is not as it should be; the details are printed.
    """
    if not console.is_terminal:
        console.width = _WIDE
    states = _states(directory)
    authorities = _authorities(directory, ca)
    with console.status("Reading the manifests …"):
        reading = _Reading(directory, _run_of(states[0]), authorities)
        for state in states:
            reading.read(state)
        lineage = Lineage(reading.entries())
        report = audit(reading.run, reading.owners, lineage, reading.files)
        sha256 = None if model is None else _digest_of_model(model)
        line = None if sha256 is None else ancestry(lineage, sha256, reading.run.schedule)
    findings = [*reading.findings, *report.findings]
    _print(console, reading.run, authorities, report)
    _list(console, "finding", findings)
    _list(console, "note", [*reading.notes, *report.notes])
    wrong = [f"{len(findings)} finding{'' if len(findings) == 1 else 's'}"] if findings else []
    if not any(row.manifests for row in report.rows):
        wrong.append("no manifest of the federation is there")
    if line is not None:
        _say(console, f"{line}.")
        _say(console, f"Manifests by round: {line.by_round()}")
        wrong += [] if line.is_whole else ["the lineage of the model is not all verified"]
    elif model is not None:
        digest = "" if model == sha256 else f" (sha256 {sha256})"
        wrong.append(f"no rightly signed manifest is of --model {printable(model, 200)}{digest}")
    if wrong:
        raise AuditError(
            f"{directory}: {'; '.join(wrong)}; see above, and ask the sites concerned, or restore the files from a copy"
        )
    _say(console, _verdict(report))


def _states(directory: Path) -> list[Path]:
    if (directory / _OWNER).is_file():
        return [directory]
    found = [path for path in directory.glob("peers/*") if path.name.isdecimal() and (path / _OWNER).is_file()]
    if not found:
        raise UsageError(f"{directory}: no {_OWNER} is there, nor in peers/ID below it; {_ADVICE}")
    return sorted(found, key=lambda path: int(path.name))


def _authorities(directory: Path, ca: Path | None) -> Authorities:
    path = ca or directory / "tls" / CA_FILE
    if ca is None and not path.exists():
        raise UsageError(
            f"{directory}: which CA is trusted must be given with --ca FILE, the {CA_FILE} that all peers of the "
            f"federation have, from whom you trust"
        )
    return load_authorities(path, "give the file with the CA certificates of the federation with --ca")


def _digest_of_model(model: str) -> str:
    """sha256 (hex) of a model that is given by it, or by its file."""
    if re.fullmatch(r"[0-9a-f]{64}", model):
        return model
    path = Path(model)
    if not path.is_file():
        raise UsageError(f"--model {printable(model, 200)}: is no file, and not 64 hexadecimal digits (a sha256)")
    return sha256_file(path)


# --- what is read -----------------------------------------------------------------------------------------------------


def _run_of(state: Path) -> Run:
    agreed = _owner_document(state)[1]
    found = re.compile(r"peers\.([0-9]{1,5})\.arch")
    architectures = {int(name[1]): str(arch) for key, arch in agreed.items() if (name := found.fullmatch(key))}
    return Run(
        digest=digest_of(agreed),
        federation=agreed["federation"],
        rounds=agreed["rounds"],
        architectures=architectures,
        may_miss=agreed.get("barrier.policy") == "quorum",
        schedule=_schedule_of(state, agreed, architectures),
    )


def _schedule_of(state: Path, agreed: dict[str, Any], peers: Collection[int]) -> Schedule | None:
    """Who takes part in which round, by the agreed fields; None if always everybody does.

    Raises:
        ConfigurationError: the fields cannot be those of a run.
    """
    active, seed, rounds = agreed.get("participation"), agreed.get("seed"), agreed["rounds"]
    if active is None:
        return None
    are_numbers = isinstance(active, int) and isinstance(seed, int)
    if not are_numbers or not 2 <= active <= len(peers) or not 0 < rounds * len(peers) <= _MOST_DRAWS:
        raise ConfigurationError(
            f"{state / _OWNER}: is damaged; expected a participation of 2 to {len(peers)} peers, a seed and a number "
            f"of rounds: put back a copy"
        )
    return drawn_schedule(tuple(sorted(peers)), rounds, seed, active)


def _owner_document(state: Path) -> tuple[int, dict[str, Any]]:
    """Whose state it is, and the agreed fields of its run.

    Raises:
        ConfigurationError: the file is damaged.
    """
    path = state / _OWNER
    try:
        tree = json.loads(_content(path, _MAX_DOCUMENT))
        peer, agreed = tree["peer"], tree["agreed"]
        name, rounds = agreed["federation"], agreed["rounds"]
        if not isinstance(peer, int) or not isinstance(rounds, int) or not re.fullmatch(FEDERATION_NAME, name):
            raise ValueError
        return peer, agreed
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError):
        raise ConfigurationError(
            f"{path}: is damaged; expected the peer and the agreed fields of its run, as crad-peer has written them: "
            f"put back a copy"
        ) from None


def _content(path: Path, limit: int) -> bytes:
    """A plain file of at most so many bytes.

    Raises:
        ValueError: it is another kind of file, or longer.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # not to wait for a writer if it is a pipe
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ValueError("is not a plain file")
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"has more than {limit} bytes")
    return content


def _lines(path: Path, limit: int) -> Iterator[tuple[int, bytes | None, bool]]:
    """Number and bytes of every line, None for one that is too long, and whether a line break ends it."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        number = 0
        while line := file.readline(limit + 1):
            number += 1
            is_whole, is_short = line.endswith(b"\n"), len(line) <= limit
            while not is_whole and (more := file.readline(1 << 20)):
                is_whole, is_short = more.endswith(b"\n"), False
            yield number, line.removesuffix(b"\n") if is_short else None, is_whole


@dataclass
class _Document:
    manifest: Manifest
    fault: str | None
    issuer: str | None  # of its certificate, if that is no trusted CA
    places: list[str] = field(default_factory=list)


class _Reading:
    """Everything that state directories hold of manifests. Each document is checked once, wherever it lies."""

    def __init__(self, directory: Path, run: Run, authorities: Authorities) -> None:
        self.run = run
        self.owners: list[Owner] = []
        self.files: list[File] = []
        self.findings: list[str] = []
        self.notes: list[str] = []
        self._directory = directory
        self._authorities = authorities
        self._documents: dict[bytes, _Document | str] = {}

    def entries(self) -> list[Entry]:
        """All manifests that can be read."""
        return [
            Entry(each.manifest, tuple(each.places), each.fault, each.issuer)
            for each in self._documents.values()
            if isinstance(each, _Document)
        ]

    def read(self, state: Path) -> None:
        """Take in one peer's state directory.

        A peer that runs moves manifests from their own files to lineage.jsonl, so that is read last.
        """
        try:
            peer, agreed = _owner_document(state)
            if digest_of(agreed) != self.run.digest:
                self._find(state / _OWNER, "is of another run than that of the first peer")
        except ConfigurationError as error:
            self.findings.append(printable(str(error), 300))
            return
        self.owners.append(_owner(state, peer))
        for number, folder in _numbered(state / "rounds"):
            self._take_file(folder / "manifest.json", peer, number, folder / SNAPSHOT_FILE)
            if (folder / SNAPSHOT_FILE).exists() and not (folder / "manifest.json").exists():  # both go at once
                self._find(folder / "manifest.json", "is not there; expected that of the snapshot beside it")
        for number, folder in _numbered(state / "received"):
            for path in sorted(folder.glob("*.json")):
                if path.stem.isdecimal():
                    self._take_file(path, int(path.stem), number, path.with_suffix(".safetensors"))
            for path in sorted(folder.glob("*.safetensors")):
                if path.stem.isdecimal() and path.is_file() and not path.with_suffix(".json").exists():
                    self._hash(path, int(path.stem), number)
        for path in sorted(state.glob("set-aside/*/manifest.json")):
            self._take_file(path, peer, None)
        for path in sorted(state.glob("quarantine/*.json")):
            if path.stem.isdecimal():
                self._take_file(path, int(path.stem), None)
        for path in sorted(state.glob("conflicts/*.json")):
            self._take_evidence(path)
        for path in sorted(state.glob("lineage*.jsonl")):  # those of others may have been put beside its own
            self._take_lines(path)

    def _take_lines(self, path: Path) -> None:
        for number, line, is_whole in _lines(path, MAX_BYTES + 1):
            place = f"{self._name(path)}, line {number}"
            if not is_whole:
                # A kill leaves this, and what it was to hold is still in its own file, or will be found missing.
                self.notes.append(f"{place}: ends without a line break, as a killed process leaves it")
            elif line is None:
                self.findings.append(f"{place}: is damaged (longer than {MAX_BYTES} bytes)")
            else:
                self._take(line, place)

    def _take_file(self, path: Path, peer: int, number: int | None, snapshot: Path | None = None) -> None:
        """A file with one manifest, which must be of this peer and round, and perhaps the snapshot beside it."""
        try:
            document = _content(path, MAX_BYTES)
        except FileNotFoundError:
            return  # a peer that runs deletes old rounds; it has brought the manifest into lineage.jsonl before
        except (OSError, ValueError) as error:
            self._find(path, f"cannot be read ({getattr(error, 'strerror', None) or error})")
            return
        manifest = self._take(document, self._name(path))
        if manifest is None:
            return
        if manifest.peer != peer or number not in (None, manifest.round):
            expected = f"peer {peer}" if number is None else f"round {number} of peer {peer}"
            self._find(path, f"holds round {manifest.round} of peer {manifest.peer}; expected {expected}")
        elif snapshot is not None and snapshot.is_file():
            self._take_snapshot(snapshot, manifest)

    def _take_snapshot(self, path: Path, manifest: Manifest) -> None:
        with suppress(FileNotFoundError):  # deleted meanwhile
            size = path.stat().st_size
            if size == manifest.size:
                self._hash(path, manifest.peer, manifest.round)
            else:  # not read: it may be endless
                self._find(path, f"has {size} bytes; expected {manifest.size} by its manifest")

    def _hash(self, path: Path, peer: int, number: int) -> None:
        try:
            self.files.append(File(peer, number, sha256_file(path), self._name(path)))
        except FileNotFoundError:
            return  # deleted meanwhile
        except OSError as error:
            self._find(path, f"cannot be read ({error.strerror})")

    def _take_evidence(self, path: Path) -> None:
        self._find(path, "is evidence of two different snapshots for one round, kept while the peers ran")
        try:
            documents = json.loads(_content(path, _MAX_DOCUMENT))["manifests"].values()
            for document in documents:
                self._take(document.encode(), self._name(path))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            self._find(path, "is damaged; expected a conflict with its manifests")

    def _take(self, document: bytes, place: str) -> Manifest | None:
        """A manifest, unless it is none."""
        key = hashlib.sha256(document).digest()
        if key not in self._documents:
            self._documents[key] = self._checked(document)
        found = self._documents[key]
        if isinstance(found, str):
            self.findings.append(f"{place}: is damaged ({found})")
            return None
        found.places.append(place)
        return found.manifest

    def _checked(self, document: bytes) -> _Document | str:
        try:
            manifest = Manifest.from_bytes(document)
        except ValueError as error:
            return printable(str(error), 200)
        fault, issuer = misfit(manifest, self.run), None
        if fault is None:
            try:
                check_signature(manifest, self.run.federation, self._authorities)
            except ValueError as error:
                fault = printable(str(error), 400)
                issuer = printable(error.issuer, 200) if isinstance(error, ForeignIssuerError) else None
        return _Document(manifest, fault, issuer)

    def _find(self, path: Path, what: str) -> None:
        self.findings.append(f"{self._name(path)}: {what}")

    def _name(self, path: Path) -> str:
        return printable(str(path.relative_to(self._directory)), 200)


def _numbered(folder: Path) -> list[tuple[int, Path]]:
    try:
        found = [(int(path.name), path) for path in folder.iterdir() if path.name.isdecimal() and path.is_dir()]
    except OSError:
        return []
    return sorted(found)


def _owner(state: Path, peer: int) -> Owner:
    """A peer, and what its history says. Nobody signs that, so a line that is damaged just says nothing."""
    recorded, recovered = set(), set()
    for _, line, _ in _lines(state / "history.jsonl", _MAX_DOCUMENT):
        with suppress(ValueError, KeyError, TypeError, RecursionError):
            record = json.loads(line or b"")
            number, seconds = record["round"], record["seconds"]
            if isinstance(number, int) and 0 <= number < 2**31:
                recorded.add(number)
                # Neither computed here nor published again: it came from another peer.
                if (
                    not any(seconds[each] for each in ("teachers", "train", "validate"))
                    and not record["skipped_rounds"]
                ):
                    recovered.add(number)
    return Owner(peer, frozenset(recorded), frozenset(recovered))


# --- what is said -----------------------------------------------------------------------------------------------------


def _say(console: Console, text: str) -> None:
    text = fold(text, console.width if console.is_terminal else None)
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _print(console: Console, run: Run, authorities: Authorities, report: Report) -> None:
    _say(console, f"Federation {run.federation}, run {run.digest}")
    for authority in authorities:
        _say(console, f"Trusted CA {name_text(authority.subject)}, sha256 {fingerprint(authority)}")
    console.print(_table(report))
    _say(
        console, "consumed: snapshots named as teachers whose own manifest names the same sha256, of all that are named"
    )


def _list(console: Console, what: str, texts: Sequence[str]) -> None:
    for text in texts[:_SHOWN]:
        _say(console, f"{what}: {text}")
    if len(texts) > _SHOWN:
        _say(console, f"… and {len(texts) - _SHOWN} more {what}s")


def _table(report: Report) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
    )
    for heading in ("peer", "rounds", "manifests", "signed", "consumed", "gaps"):
        justify: Literal["left", "right"] = "right"
        table.add_column(heading, justify=justify, no_wrap=True)
    for row in report.rows:
        table.add_row(
            str(row.peer),
            "-" if row.first is None else f"{row.first} to {row.last}",
            str(row.manifests),
            str(row.signed),
            f"{row.verified} of {row.consumed}",
            str(row.gaps) if row.gaps else "-",
        )
    return table


def _verdict(report: Report) -> str:
    verified, consumed = sum(row.verified for row in report.rows), sum(row.consumed for row in report.rows)
    whole = verified == consumed and not any(row.gaps for row in report.rows)
    return (
        f"{sum(row.manifests for row in report.rows)} manifests are signed by their peers, {verified} of {consumed} "
        f"consumed snapshots are verified, and {report.files} snapshot files have the digests of their manifests. "
        + ("All is verified." if whole else "Nothing is wrong; what is not here is explained above.")
    )
