"""What signed manifests prove of the models that they speak of, and where the proof is broken. Pure: no files.

Every manifest names by sha256 the snapshot of its round and those that taught it, so all of them together are a graph
that leads from every model back to the initial ones. Each edge is *verified* if the manifest of the (peer, round) that
it leads to is there, rightly signed, and names the same sha256.

A manifest that is not there is a finding, unless signed words of the peer that kept them say why it need not have it:
its own manifests name whom it went without, and which rounds it skipped. Only where a disk was lost does its history,
which nobody signs, have to be believed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from crad_p2p.foreign import printable
from crad_p2p.manifest import Manifest
from crad_p2p.participation import Schedule
from peer.words import name_peers

#: (peer, round)
Key = tuple[int, int]


@dataclass(frozen=True)
class Run:
    """What the manifests must be of. ``architectures`` by peer; ``may_miss``: rounds go on without a peer (quorum);
    ``schedule``: who takes part in which round, None if always everybody does.
    """

    digest: str
    federation: str
    rounds: int
    architectures: Mapping[int, str]
    may_miss: bool
    schedule: Schedule | None = None

    def has_part(self, key: Key) -> bool:
        """Whether a peer publishes a round."""
        return self.schedule is None or self.schedule.takes_part(*key)


@dataclass(frozen=True)
class Owner:
    """A peer whose state directory is looked at.

    Of its history: ``recorded`` are the rounds that have a line, ``recovered`` those that came back from other peers
    after this one had lost them.
    """

    peer: int
    recorded: frozenset[int] = frozenset()
    recovered: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Entry:
    """A manifest, where it was found, and why it does not count; None if its signature, run and content are right.

    ``issuer`` names the CA of its certificate, if the fault is that this is not a trusted one.
    """

    manifest: Manifest
    places: tuple[str, ...]
    fault: str | None = None
    issuer: str | None = None


@dataclass(frozen=True)
class File:
    """A snapshot file and its sha256 (hex), and of which peer and round it should be."""

    peer: int
    round: int
    sha256: str
    place: str


@dataclass(frozen=True)
class Row:
    """One peer: its first and last round, manifests that are there and how many of them are rightly signed, snapshots
    that they name as consumed and how many of those are verified, and rounds of which the manifest is missing.
    """

    peer: int
    first: int | None
    last: int | None
    manifests: int
    signed: int
    consumed: int
    verified: int
    gaps: int


@dataclass(frozen=True)
class Report:
    """Findings are what is wrong, notes what is explained, a sentence each; ``files`` snapshots that are right."""

    rows: tuple[Row, ...]
    findings: tuple[str, ...]
    notes: tuple[str, ...]
    files: int


def misfit(manifest: Manifest, run: Run) -> str | None:
    """What no peer of this run would have published or taken, as a phrase that goes on after the manifest's place."""
    if manifest.run != run.digest:
        return f"is of another run ({manifest.run[:12]}…, expected {run.digest[:12]}…)"
    if manifest.peer not in run.architectures:
        return f"is of peer {manifest.peer}, which is not in the federation"
    if manifest.round > run.rounds:
        return f"is of round {manifest.round}; expected at most {run.rounds}"
    if (arch := run.architectures[manifest.peer]) != manifest.arch:
        return f"says architecture {printable(manifest.arch)}; expected {arch}"
    teachers = [each.peer for each in manifest.consumed]
    named = [*teachers, *manifest.missing, *manifest.quarantined]
    if strangers := sorted({j for j in named if j == manifest.peer or j not in run.architectures}):
        return f"names {strangers[:5]} as teachers; expected other peers of the federation"
    if len(set(teachers)) < len(teachers):
        return "names a peer twice as teacher"
    if late := [each.round for each in manifest.consumed if each.round >= manifest.round]:
        return f"names teachers of round {max(late)}; expected rounds before {manifest.round}"
    if run.schedule is not None:
        if not run.has_part((manifest.peer, manifest.round)):
            return f"is of round {manifest.round}, in which peer {manifest.peer} has no part"
        for each in manifest.consumed:
            expected = run.schedule.version(each.peer, manifest.round - 1)
            if not run.has_part((each.peer, manifest.round)) or each.round != expected:
                return (
                    f"names round {each.round} of peer {each.peer} as teacher, which the participation does not allow"
                )
    return None


class Lineage:
    """The graph. Entries with a fault are no part of it, but their peer and round do not count as missing either."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.entries = tuple(entries)
        self.versions: dict[Key, dict[str, list[Entry]]] = defaultdict(lambda: defaultdict(list))
        self.chains: dict[int, dict[int, list[Manifest]]] = defaultdict(lambda: defaultdict(list))
        self.unproven: set[Key] = set()
        for entry in self.entries:
            manifest = entry.manifest
            if entry.fault is not None:
                self.unproven.add((manifest.peer, manifest.round))
                continue
            self.versions[manifest.peer, manifest.round][manifest.sha256].append(entry)
            self.chains[manifest.peer][manifest.round].append(manifest)

    def manifests(self) -> Iterable[Manifest]:
        """Those without a fault, by peer and round."""
        for peer in sorted(self.chains):
            for number in sorted(self.chains[peer]):
                yield from self.chains[peer][number]

    def has(self, key: Key, sha256: str) -> bool:
        """Whether the manifest of a (peer, round) is there and names this snapshot."""
        return key in self.versions and sha256 in self.versions[key]

    def is_gone(self, key: Key) -> bool:
        """Whether there is no manifest of a (peer, round) at all."""
        return key not in self.versions and key not in self.unproven

    def claims(self) -> dict[Key, dict[str, list[Key]]]:
        """By (peer, round) and sha256: who says that this is its snapshot, other than its own manifest."""
        found: dict[Key, dict[str, list[Key]]] = defaultdict(lambda: defaultdict(list))
        for manifest in self.manifests():
            said = [(each.peer, each.round, each.sha256) for each in manifest.consumed]
            if manifest.model_round < manifest.round:
                said.append((manifest.peer, manifest.model_round, manifest.sha256))
            for peer, number, sha256 in said:
                found[peer, number][sha256].append((manifest.peer, manifest.round))
        return found

    def skipped(self, peer: int) -> set[int]:
        """Rounds that a peer did not publish: it came back and published an older model again as that of the mesh."""
        return {
            number
            for manifests in self.chains.get(peer, {}).values()
            for each in manifests
            for number in range(each.model_round + 1, each.round)
            if (peer, number) not in self.versions
        }


def audit(run: Run, owners: Sequence[Owner], lineage: Lineage, files: Iterable[File] = ()) -> Report:
    """Everything that can be said of the manifests and snapshot files in the state directories of some peers."""
    claims = lineage.claims()
    missing = {key for key in _missing(owners, lineage, claims) if run.has_part(key)}
    explained, unexplained = _explain(run, owners, lineage, missing, claims)
    right, wrong, unknown = _compare_files(lineage, files)
    notes = [*_resigned(lineage), *explained]
    if unknown:
        notes.append(f"{_count(unknown, 'snapshot file')} could not be compared: no manifest of that round is there")
    findings = [*_faults(lineage), *_twice(lineage), *_contradicted(lineage, claims), *unexplained]
    findings += [*_counts(lineage), *wrong]
    rows = tuple(_row(peer, lineage, missing) for peer in sorted(run.architectures))
    return Report(rows, tuple(findings), tuple(notes), right)


# --- what is wrong whatever else is there -----------------------------------------------------------------------------


def _faults(lineage: Lineage) -> Iterable[str]:
    unsigned: dict[int, list[Entry]] = defaultdict(list)
    foreign: dict[str, list[Entry]] = defaultdict(list)
    for entry in lineage.entries:
        if entry.issuer is not None:
            foreign[entry.issuer].append(entry)
        elif entry.fault is not None and entry.manifest.signature is None:
            unsigned[entry.manifest.peer].append(entry)
        elif entry.fault is not None:
            yield f"{_places(entry)}: {entry.fault}"
    for issuer, entries in sorted(foreign.items()):
        whose = name_peers(sorted({entry.manifest.peer for entry in entries}))
        span = _span(entry.manifest.round for entry in entries)
        yield (
            f"{_count(len(entries), 'manifest')} of {whose} ({span}) {'is' if len(entries) == 1 else 'are'} signed "
            f"under the CA {issuer}, which is not among those of --ca; was the CA replaced? Then give both, in one "
            f"file; the first is {_places(entries[0])}"
        )
    for peer, entries in sorted(unsigned.items()):
        span = _span(entry.manifest.round for entry in entries)
        yield (
            f"{_count(len(entries), 'manifest')} of peer {peer} ({span}) {'is' if len(entries) == 1 else 'are'} not "
            f"signed, as those of a run with --insecure; the first is {_places(entries[0])}"
        )


def _twice(lineage: Lineage) -> Iterable[str]:
    for (peer, number), versions in sorted(lineage.versions.items()):
        if len(versions) > 1:
            said = "; ".join(f"{sha256[:12]}… ({_places(entries[0])})" for sha256, entries in sorted(versions.items()))
            yield f"peer {peer} has signed {len(versions)} different snapshots for round {number}: {said}"


def _contradicted(lineage: Lineage, claims: Mapping[Key, Mapping[str, Sequence[Key]]]) -> Iterable[str]:
    for key, said in sorted(claims.items()):
        peer, number = key
        if lineage.is_gone(key):
            if len(said) > 1:
                them = " and ".join(f"{sha256[:12]}… ({_who(by)})" for sha256, by in sorted(said.items())[:3])
                yield f"{len(said)} different snapshots of round {number} of peer {peer} are named: {them}"
            continue
        for sha256, by in sorted(said.items()):
            if key in lineage.versions and not lineage.has(key, sha256):
                own = ", ".join(f"{each[:12]}…" for each in sorted(lineage.versions[key]))
                yield (
                    f"round {number} of peer {peer} has snapshot {own} by its own manifest, and {sha256[:12]}… by "
                    f"{_who(by)}"
                )


def _counts(lineage: Lineage) -> Iterable[str]:
    for peer, chain in sorted(lineage.chains.items()):
        first = min(chain)
        counts = chain[first][0].statistics.counts
        for number in sorted(chain):
            other = next((each.statistics.counts for each in chain[number] if each.statistics.counts != counts), None)
            if other is not None:
                differ = [c for c, (a, b) in enumerate(zip(counts, other, strict=False)) if a != b]
                where = f"{counts[differ[0]]} and {other[differ[0]]} of class {differ[0]}" if differ else "classes"
                yield (
                    f"peer {peer} counts other validation images in round {number} than in round {first} ({where}); "
                    f"they must stay the same over the run"
                )
                break


def _compare_files(lineage: Lineage, files: Iterable[File]) -> tuple[int, list[str], int]:
    right, wrong, unknown = 0, [], 0
    for file in files:
        key = file.peer, file.round
        if lineage.has(key, file.sha256):
            right += 1
        elif key in lineage.versions:
            expected = ", ".join(f"{each[:12]}…" for each in sorted(lineage.versions[key]))
            wrong.append(f"{file.place}: has sha256 {file.sha256[:12]}…; expected {expected} by its manifest")
        else:
            unknown += 1
    return right, wrong, unknown


# --- what is missing --------------------------------------------------------------------------------------------------


def _missing(owners: Sequence[Owner], lineage: Lineage, named: Collection[Key]) -> set[Key]:
    """(peer, round) of every manifest that is named, or lies between others of its peer, and is not there."""
    missing = {key for key in named if lineage.is_gone(key)}
    spans = {peer: range(min(chain), max(chain)) for peer, chain in lineage.chains.items()}
    # Whose directory it is has had all its rounds from the first on; of others it may have come in later.
    spans |= {owner.peer: range(_last(owner, lineage) + 1) for owner in owners}
    for peer, span in spans.items():
        skipped = lineage.skipped(peer)
        missing |= {(peer, number) for number in span if lineage.is_gone((peer, number)) and number not in skipped}
    return missing


def _last(owner: Owner, lineage: Lineage) -> int:
    """The newest round of which an owner's manifests or history tell; -1 for none."""
    return max([*lineage.chains.get(owner.peer, ()), *owner.recorded], default=-1)


#: Why an owner need not have a manifest, and how that is told.
_REASONS = {
    "lost": "peer {peer} lost its disk: {what} not here. Only its history.jsonl, which nobody signs, says so",
    "skipped": "peer {peer} was away: {what} not here, of rounds that it skipped by its own manifests",
    "without": "peer {peer} went on without: {what} not here, and its own manifests do not name them as used",
    "ahead": "peer {peer} has not come so far: {what} not here, and others have used them already",
}


def _explain(
    run: Run,
    owners: Sequence[Owner],
    lineage: Lineage,
    missing: Iterable[Key],
    claims: Mapping[Key, Mapping[str, Sequence[Key]]],
) -> tuple[list[str], list[str]]:
    """Notes on what need not be there, and findings on what must be."""
    shelves = [_Shelf(run, owner, lineage) for owner in owners]
    explained: dict[tuple[int, str], list[Key]] = defaultdict(list)
    wrong = []
    for key in _ordered(missing):
        reasons = [(shelf.owner.peer, shelf.why_not_here(key)) for shelf in shelves]
        if all(reason for _, reason in reasons):
            for peer, reason in reasons[:1]:
                explained[peer, str(reason)].append(key)
            continue
        by = [consumer for consumers in claims.get(key, {}).values() for consumer in consumers]
        named = f"{_who(by)} name{'s' if len(by) == 1 else ''} its snapshot" if by else "it must have been"
        wrong.append(f"round {key[1]} of peer {key[0]}: its manifest is not here, though {named}")
    notes = []
    for (peer, reason), keys in sorted(explained.items()):
        peers = sorted({each for each, _ in keys})
        whose = f"peer{'s' if len(peers) > 1 else ''} {', '.join(map(str, peers[:10]))}{', …' if peers[10:] else ''}"
        what = f"{_count(len(keys), 'manifest')} of {whose} ({_span(number for _, number in keys)}) "
        notes.append(_REASONS[reason].format(peer=peer, what=what + ("is" if len(keys) == 1 else "are")))
    return notes, wrong


class _Shelf:
    """What the directory of one peer should hold."""

    def __init__(self, run: Run, owner: Owner, lineage: Lineage) -> None:
        self.owner = owner
        self._run = run
        self._chain = lineage.chains.get(owner.peer, {})
        self._last = _last(owner, lineage)
        self._skipped = lineage.skipped(owner.peer)
        self._lost = self._lost_rounds()
        self._used = {
            (each.peer, each.round)
            for number, manifests in self._chain.items()
            if number not in owner.recovered
            for manifest in manifests
            for each in manifest.consumed
        }

    def _lost_rounds(self) -> set[int]:
        """Own rounds that are gone with a disk: without a line of history, and before one that was fetched back."""
        lost, pending = set(), set()
        for number in range(max(self._chain, default=-1) + 1):
            if number not in self._chain:
                if self._run.has_part((self.owner.peer, number)):
                    pending |= {number} - self._skipped
                continue
            if number in self.owner.recovered:
                lost |= pending - self.owner.recorded
            pending = set()
        return lost

    def why_not_here(self, key: Key) -> str | None:
        """A key of ``_REASONS``; None if the manifest of this (peer, round) must be here."""
        peer, number = key
        if peer == self.owner.peer:
            return "lost" if number in self._lost else None
        if key in self._used:  # taken here, by this peer's own signed word
            return None
        if self._run.schedule is not None:  # every round is collected before the next one is trained or passed
            if self.owner.recovered and number <= max(self.owner.recovered):
                return "lost"
            return "ahead" if number >= self._last else None
        following = number + 1
        if number in self._lost or following in self._lost or following in self.owner.recovered:
            return "lost"
        if following > self._last:
            return "ahead"
        if following in self._skipped:
            return "skipped"
        if following not in self._chain:
            return None
        return self._why_not_used(peer, self._chain[following][0])

    def _why_not_used(self, peer: int, own: Manifest) -> str | None:
        """By the own manifest of the round after."""
        if own.model_round < own.round:
            return "skipped"
        stale = any(each.peer == peer and each.round < own.round - 1 for each in own.consumed)
        if peer in own.missing or peer in own.quarantined or stale:
            return "without"
        nobody_teaches = not (own.consumed or own.missing or own.quarantined)
        return "without" if nobody_teaches and self._run.may_miss else None


# --- words ------------------------------------------------------------------------------------------------------------


def _resigned(lineage: Lineage) -> Iterable[str]:
    several = [key for key, versions in lineage.versions.items() if any(len(each) > 1 for each in versions.values())]
    if several:
        yield (
            f"of {_count(len(several), 'round')} there are several manifests with the same snapshot, each rightly "
            f"signed: made or signed again after a crash (first: round {min(several)[1]} of peer {min(several)[0]})"
        )


def _row(peer: int, lineage: Lineage, missing: Iterable[Key]) -> Row:
    entries = [entry for entry in lineage.entries if entry.manifest.peer == peer]
    chain = lineage.chains.get(peer, {})
    consumed = {
        (entry.manifest.round, (each.peer, each.round), each.sha256)
        for entry in entries
        for each in entry.manifest.consumed
    }
    proven = {
        (number, (each.peer, each.round), each.sha256)
        for number, manifests in chain.items()
        for manifest in manifests
        for each in manifest.consumed
    }
    return Row(
        peer=peer,
        first=min(chain, default=None),
        last=max(chain, default=None),
        manifests=len(entries),
        signed=sum(entry.fault is None for entry in entries),
        consumed=len(consumed),
        verified=sum(lineage.has(key, sha256) for _, key, sha256 in proven),
        gaps=sum(each == peer for each, _ in missing),
    )


def _places(entry: Entry) -> str:
    more = len(entry.places) - 1
    return entry.places[0] + (f" (and {_count(more, 'other place')})" if more else "")


def _who(keys: Sequence[Key]) -> str:
    """``round 4 of peer 2 and 7 others``"""
    peer, number = min(keys, key=lambda key: (key[1], key[0]))
    more = f" and {_count(len(keys) - 1, 'other')}" if len(keys) > 1 else ""
    return f"round {number} of peer {peer}{more}"


def _span(numbers: Iterable[int]) -> str:
    found = sorted(set(numbers))
    return f"round {found[0]}" if len(found) == 1 else f"rounds {found[0]} to {found[-1]}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


# --- one model --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ancestry:
    """Of one model: number of manifests by round, its own included; ``missing`` are (peer, round) without a right
    manifest, ``disputed`` those with another snapshot than is named, or with several.
    """

    peer: int
    round: int
    sha256: str
    rounds: Mapping[int, int]
    missing: tuple[Key, ...]
    disputed: tuple[Key, ...]

    @property
    def is_whole(self) -> bool:
        """Whether the model is proved to descend from initial ones alone."""
        return not self.missing and not self.disputed

    def __str__(self) -> str:
        me, total = f"model {self.sha256[:12]}… (round {self.round} of peer {self.peer})", sum(self.rounds.values())
        if self.round == 0:
            return f"{me} is an initial model; its manifest is signed by its peer; nothing is missing"
        start = f"{me} descends from {_count(self.rounds.get(0, 0), 'initial model')}"
        signed = f"{_count(total, 'manifest')}, all signed by their peers"
        if self.is_whole:
            return f"{start}; {signed}; nothing is missing"
        wrong = [(f"{len(keys)} {what}", keys) for what, keys in self._wrong() if keys]
        said = "; ".join(f"{words} (first: round {keys[0][1]} of peer {keys[0][0]})" for words, keys in wrong)
        return f"{start}; {signed}, but {said}, so not all of it is verified"

    def _wrong(self) -> list[tuple[str, tuple[Key, ...]]]:
        return [
            ("without a rightly signed manifest", self.missing),
            ("with another snapshot than is named", self.disputed),
        ]

    def by_round(self) -> str:
        """``round 5: 1, rounds 0 to 4: 3 each``, from the newest on."""
        groups: list[list[int]] = []
        for number in sorted(self.rounds, reverse=True):
            if groups and self.rounds[groups[-1][-1]] == self.rounds[number] and groups[-1][-1] == number + 1:
                groups[-1].append(number)
            else:
                groups.append([number])
        return ", ".join(
            f"{_span(group)}: {self.rounds[group[0]]}{' each' if len(group) > 1 else ''}" for group in groups
        )


def ancestry(lineage: Lineage, sha256: str, schedule: Schedule | None = None) -> Ancestry | None:
    """The lineage of a model by its sha256 (hex), from where it was trained; None if nobody has published it."""
    published = [manifest for manifest in lineage.manifests() if manifest.sha256 == sha256]
    if not published:
        return None
    origin = min(published, key=lambda each: (each.round, each.peer))
    seen: set[tuple[Key, str | None]] = set()
    visited: set[Key] = set()
    missing: set[Key] = set()
    disputed: set[Key] = set()
    ahead: list[tuple[Key, str | None]] = [((origin.peer, origin.round), sha256)]
    while ahead:
        key, expected = step = ahead.pop()
        if step in seen:
            continue
        seen.add(step)
        versions = lineage.versions.get(key, {})
        if not versions:
            missing.add(key)
            continue
        visited.add(key)
        if len(versions) > 1 or (expected is not None and expected not in versions):
            disputed.add(key)
        for digest, entries in versions.items():
            if expected in (None, digest):
                for entry in entries:
                    ahead += _parents(entry.manifest, schedule)
    rounds: dict[int, int] = defaultdict(int)
    for _, number in visited:
        rounds[number] += 1
    return Ancestry(origin.peer, origin.round, sha256, dict(rounds), _ordered(missing), _ordered(disputed))


def _ordered(keys: Iterable[Key]) -> tuple[Key, ...]:
    return tuple(sorted(keys, key=lambda key: (key[1], key[0])))


def _parents(manifest: Manifest, schedule: Schedule | None) -> Iterable[tuple[Key, str | None]]:
    """What a model was made of: the same peer's model before it, and its teachers."""
    if manifest.model_round < manifest.round:
        yield (manifest.peer, manifest.model_round), manifest.sha256
        return
    if manifest.round > 0:
        before = manifest.round - 1
        yield (manifest.peer, before if schedule is None else schedule.version(manifest.peer, before)), None
    for each in manifest.consumed:
        yield (each.peer, each.round), each.sha256
