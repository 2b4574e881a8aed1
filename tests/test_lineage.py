"""What manifests prove, and what of the missing ones is explained: decisions alone, without files or signatures."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from lineages import ROUNDS, Manifests, consumed, federation, manifest, rejoining, sha256, whole_run

from crad_p2p.manifest import ClassStatistics, Manifest
from launch.lineage import Entry, File, Lineage, Owner, Report, Run, ancestry, audit, misfit

ALL = frozenset(range(1, ROUNDS + 1))


def run_of(policy: str = "all") -> Run:
    of = federation(policy)
    return Run(of.digest(), of.federation, of.rounds, dict.fromkeys(of.ids, "cnn6"), policy == "quorum")


def lineage_of(manifests: Iterable[Manifest]) -> Lineage:
    return Lineage(Entry(each, (f"{each.peer}/{each.round}",)) for each in manifests)


def audited(
    manifests: Manifests | list[Manifest], *owners: Owner, policy: str = "all", files: Iterable[File] = ()
) -> Report:
    them = manifests.values() if isinstance(manifests, dict) else manifests
    return audit(run_of(policy), owners or (Owner(0, ALL),), lineage_of(them), files)


def without(manifests: Manifests, *keys: tuple[int, int]) -> Manifests:
    return {key: each for key, each in manifests.items() if key not in keys}


# --- what is whole ----------------------------------------------------------------------------------------------------


def test_a_whole_run_is_verified() -> None:
    report = audited(whole_run())
    assert (report.findings, report.notes) == ((), ())
    for row in report.rows:
        assert (row.first, row.last, row.manifests, row.signed, row.gaps) == (0, ROUNDS, ROUNDS + 1, ROUNDS + 1, 0)
        assert row.consumed == row.verified == 2 * ROUNDS


def test_a_manifest_that_was_made_again_with_the_same_snapshot_is_a_note() -> None:
    again = manifest(1, 3, missing=(2,), consumed=(consumed(0, 2),))
    report = audited([*whole_run().values(), again])
    assert report.findings == ()
    assert report.notes == (
        "of 1 round there are several manifests with the same snapshot, each rightly signed: made or signed again "
        "after a crash (first: round 3 of peer 1)",
    )
    assert report.rows[1].manifests == ROUNDS + 2
    assert report.rows[1].verified == report.rows[1].consumed


# --- what contradicts -------------------------------------------------------------------------------------------------


def test_another_digest_of_a_consumed_snapshot_is_a_finding_with_both() -> None:
    them = whole_run()
    other = consumed(0, 1).model_copy(update={"sha256": "f" * 64})
    them[1, 2] = manifest(1, 2, consumed=(other, consumed(2, 1)))
    (finding,) = audited(them).findings
    assert finding == (
        f"round 1 of peer 0 has snapshot {sha256(0, 1)[:12]}… by its own manifest, and ffffffffffff… by round 2 of "
        f"peer 1"
    )
    assert audited(them).rows[1].verified == 2 * ROUNDS - 1


def test_two_snapshots_of_one_round_are_a_finding_with_their_places() -> None:
    report = audited([*whole_run().values(), manifest(2, 4, sha256="e" * 64)])
    (finding,) = report.findings
    assert "peer 2 has signed 2 different snapshots for round 4: " in finding
    assert finding.count("(2/4)") == 2


def test_two_names_for_the_snapshot_of_a_round_that_is_not_here() -> None:
    them = without(whole_run(), (2, 1))
    them[1, 2] = manifest(1, 2, consumed=(consumed(0, 1), consumed(2, 1).model_copy(update={"sha256": "f" * 64})))
    findings = audited(them).findings
    assert any(each.startswith("2 different snapshots of round 1 of peer 2 are named: ") for each in findings)


def test_counts_must_stay_the_same() -> None:
    them = whole_run()
    them[2, 5] = manifest(2, 5, statistics=ClassStatistics(counts=(4, 9), hits=(1, 2), predicted=(3, 5)))
    assert audited(them).findings == (
        "peer 2 counts other validation images in round 5 than in round 0 (4 and 9 of class 1); they must stay the "
        "same over the run",
    )


def test_a_model_that_is_published_again_must_be_the_same() -> None:
    them = without(whole_run(), *[(2, number) for number in range(3, 7)])
    for number in range(4, ROUNDS + 1):
        for peer in (0, 1):
            them[peer, number] = manifest(peer, number, consumed=(consumed(1 - peer, number - 1),), missing=(2,))
    them[2, 6] = rejoining(2, 6, 2, run=None).model_copy(update={"sha256": "d" * 64})
    (finding,) = audited(them, policy="quorum").findings
    assert finding.startswith(f"round 2 of peer 2 has snapshot {sha256(2, 2)[:12]}… by its own manifest, and dddd")
    assert finding.endswith("by round 6 of peer 2")


def test_snapshot_files_are_compared() -> None:
    files = [
        File(0, 6, sha256(0, 6), "rounds/6"),
        File(1, 5, sha256(0, 5), "received/5"),
        File(1, 9, sha256(0, 5), "received/9"),
    ]
    report = audited(whole_run(), files=files)
    assert report.files == 1
    assert report.findings == (
        f"received/5: has sha256 {sha256(0, 5)[:12]}…; expected {sha256(1, 5)[:12]}… by its manifest",
    )
    assert report.notes == ("1 snapshot file could not be compared: no manifest of that round is there",)


def test_a_manifest_with_a_fault_does_not_count_but_is_not_missing_either() -> None:
    entries = [Entry(each, ("here",)) for each in without(whole_run(), (1, 2)).values()]
    entries.append(Entry(manifest(1, 2), ("there", "twice"), "is not signed"))
    report = audit(run_of(), [Owner(0, ALL)], Lineage(entries))
    assert report.findings == (
        "1 manifest of peer 1 (round 2) is not signed, as those of a run with --insecure; the first is there "
        "(and 1 other place)",
    )
    assert (report.rows[1].manifests, report.rows[1].signed, report.rows[1].gaps) == (ROUNDS + 1, ROUNDS, 0)
    assert report.rows[0].verified == 2 * ROUNDS - 1


# --- what is missing --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [(0, 0), (1, 0), (0, 3), (1, 3), (2, 5)])
@pytest.mark.parametrize("policy", ["all", "quorum"])
def test_a_missing_manifest_that_must_be_here_is_one_finding(key: tuple[int, int], policy: str) -> None:
    report = audited(without(whole_run(), key), policy=policy)
    peer, number = key
    (finding,) = report.findings
    first = 1 if peer == 0 else 0
    assert finding == (
        f"round {number} of peer {peer}: its manifest is not here, though round {number + 1} of peer {first} and 1 "
        f"other name its snapshot"
    )
    assert report.notes == ()
    assert report.rows[peer].gaps == 1


def test_without_teachers_a_gap_is_found_all_the_same() -> None:
    alone = {key: manifest(*key, consumed=()) for key in whole_run()}
    assert audited(without(alone, (1, 3))).findings == (
        "round 3 of peer 1: its manifest is not here, though it must have been",
    )
    report = audited(without(alone, (1, 3)), policy="quorum")  # which may have gone on without it
    assert report.findings == ()
    assert "peer 0 went on without: 1 manifest of peer 1 (round 3) is not here" in report.notes[0]


def test_own_rounds_that_the_history_has_are_missing_also_at_the_end() -> None:
    report = audited(without(whole_run(), (0, ROUNDS)))
    assert report.findings == ("round 6 of peer 0: its manifest is not here, though it must have been",)
    assert audited([]).findings[0].startswith("round 0 of peer 0: ")


def after_a_lost_disk(kept: int = 0) -> Manifests:
    """Own rounds 3 and 4 came back, what had been received before the loss did not; 5 and 6 were trained anew."""
    return {
        (peer, number): each
        for (peer, number), each in whole_run().items()
        if number <= kept - 1 or number >= 4 or (peer == 0 and number >= 3)
    }


@pytest.mark.parametrize("kept", [0, 2])
def test_what_a_lost_disk_took_is_a_note_if_the_history_agrees(kept: int) -> None:
    recorded = frozenset({*range(1, kept), 3, 4, 5, 6})
    report = audited(after_a_lost_disk(kept), Owner(0, recorded, recovered=frozenset({3, 4})))
    assert report.findings == ()
    assert report.notes[0].startswith("peer 0 lost its disk: ")
    assert "history.jsonl" in report.notes[0]
    assert report.rows[0].gaps == 3 - kept


def test_what_a_lost_disk_did_not_take_is_a_finding() -> None:
    owner = Owner(0, frozenset({3, 4, 5, 6}), recovered=frozenset({3, 4}))
    assert len(audited(without(after_a_lost_disk(), (1, 4)), owner).findings) == 1
    assert len(audited(without(after_a_lost_disk(), (0, 5)), owner).findings) == 1


@pytest.mark.parametrize(
    "owner",
    [
        Owner(0, ALL),  # its history has all rounds
        Owner(0, frozenset({3, 4, 5, 6})),  # none came from others
        Owner(0),  # no history
    ],
)
def test_a_beginning_that_is_cut_off_is_found(owner: Owner) -> None:
    assert any(
        each.startswith("round 0 of peer 0: its manifest is not here")
        for each in audited(after_a_lost_disk(), owner).findings
    )


def with_peer_2_away() -> Manifests:
    """Peer 2 published rounds 0 and 1, and came back at round 4 with the model of round 1."""
    them = {key: each for key, each in whole_run().items() if key[0] != 2 or key[1] in (0, 1, 5, 6)}
    for peer in (0, 1):
        stale = (consumed(1 - peer, 2), consumed(2, 1))
        them[peer, 3] = manifest(peer, 3, consumed=stale)
        them[peer, 4] = manifest(peer, 4, consumed=(consumed(1 - peer, 3),), missing=(2,))
        republished = consumed(2, 4).model_copy(update={"sha256": sha256(2, 1)})
        them[peer, 5] = manifest(peer, 5, consumed=(consumed(1 - peer, 4), republished))
    them[2, 4] = rejoining(2, 4, 1)
    return them


def test_skipped_rounds_of_others_are_no_gap() -> None:
    report = audited(with_peer_2_away(), policy="quorum")
    assert (report.findings, report.notes) == ((), ())
    assert report.rows[2].gaps == 0


def test_what_a_peer_does_not_have_of_the_rounds_that_it_skipped_is_a_note() -> None:
    them = without(with_peer_2_away(), *[(peer, number) for peer in (0, 1) for number in (2, 3)])
    report = audited(them, Owner(2, frozenset({1, 4, 5, 6})), policy="quorum")
    assert report.findings == ()
    assert report.notes == (
        "peer 2 was away: 4 manifests of peers 0, 1 (rounds 2 to 3) are not here, of rounds that it skipped by its own "
        "manifests",
    )
    for owner in (Owner(0, ALL), Owner(1, ALL)):
        assert len(audited(them, owner, policy="quorum").findings) == 4  # who was there must have them


def test_a_round_that_was_skipped_and_is_named_all_the_same_is_found() -> None:
    them = with_peer_2_away()
    them[1, 4] = manifest(1, 4, consumed=(consumed(0, 3), consumed(2, 3)))
    (finding,) = audited(them, Owner(2, frozenset({1, 4, 5, 6})), policy="quorum").findings
    assert finding == "round 3 of peer 2: its manifest is not here, though round 4 of peer 1 names its snapshot"


@pytest.mark.parametrize(
    "changes",
    [
        {"missing": (2,), "consumed": (consumed(1, 2),)},
        {"quarantined": (2,), "consumed": (consumed(1, 2),)},
        {"consumed": (consumed(1, 2), consumed(2, 1))},
    ],
)
def test_what_a_peer_went_on_without_is_a_note(changes: dict[str, Any]) -> None:
    them = without(whole_run(), (2, 2))
    them[0, 3] = manifest(0, 3, **changes)
    report = audited(them, policy="quorum")
    assert report.findings == ()
    assert report.notes == (
        "peer 0 went on without: 1 manifest of peer 2 (round 2) is not here, and its own manifests do not name them as "
        "used",
    )
    assert len(audited(them, Owner(1, ALL), policy="quorum").findings) == 1  # which has used it


def test_others_may_be_ahead() -> None:
    them = {key: each for key, each in whole_run().items() if key[1] <= 3}
    them[1, 5] = manifest(1, 5, consumed=(consumed(2, 4),), missing=(0,))
    owner = Owner(0, frozenset({1, 2, 3}))
    report = audited(them, owner, policy="quorum")
    assert report.findings == ()
    assert report.notes == (
        "peer 0 has not come so far: 2 manifests of peers 1, 2 (round 4) are not here, and others have used them "
        "already",
    )
    them[1, 5] = manifest(1, 5)  # which has used round 4 of this peer: it was here once
    assert audited(them, owner, policy="quorum").findings == (
        "round 4 of peer 0: its manifest is not here, though round 5 of peer 1 names its snapshot",
    )


# --- what cannot be of this run ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"run": "a" * 64}, "is of another run (aaaaaaaaaaaa…, expected "),
        ({"peer": 7}, "is of peer 7, which is not in the federation"),
        ({"round": 7, "model_round": 7}, "is of round 7; expected at most 6"),
        ({"arch": "\x1b[2Jcnn6"}, r"says architecture \x1b[2Jcnn6; expected cnn6"),
        ({"missing": (9,)}, "names [9] as teachers"),
        ({"quarantined": (0,)}, "names [0] as teachers"),
        ({"consumed": (consumed(1, 0), consumed(1, 1))}, "names a peer twice as teacher"),
        ({"consumed": (consumed(1, 3),)}, "names teachers of round 3; expected rounds before 3"),
    ],
)
def test_misfits(changes: dict[str, Any], reason: str) -> None:
    whole = manifest(0, 3)
    assert misfit(whole, run_of()) is None
    assert (misfit(whole.model_copy(update=changes), run_of()) or "").startswith(reason)


# --- one model --------------------------------------------------------------------------------------------------------


def test_a_model_descends_from_all_initial_ones() -> None:
    found = ancestry(lineage_of(whole_run().values()), sha256(1, 5))
    assert found is not None
    assert found.rounds == {5: 1, 4: 3, 3: 3, 2: 3, 1: 3, 0: 3}
    assert found.is_whole
    assert str(found) == (
        f"model {sha256(1, 5)[:12]}… (round 5 of peer 1) descends from 3 initial models; 16 manifests, all signed by "
        f"their peers; nothing is missing"
    )
    assert found.by_round() == "round 5: 1, rounds 0 to 4: 3 each"


def test_an_initial_model_and_one_that_nobody_published() -> None:
    lineage = lineage_of(whole_run().values())
    found = ancestry(lineage, sha256(2, 0))
    assert found is not None
    assert str(found).endswith(
        "(round 0 of peer 2) is an initial model; its manifest is signed by its peer; nothing is missing"
    )
    assert ancestry(lineage, "0" * 64) is None


def test_a_model_with_a_missing_and_a_disputed_ancestor() -> None:
    them = without(whole_run(), (2, 1))
    them[0, 2] = manifest(0, 2, sha256="c" * 64)
    found = ancestry(lineage_of(them.values()), sha256(1, 5))
    assert found is not None
    assert (found.missing, found.disputed) == (((2, 1),), ((0, 2),))
    assert not found.is_whole
    assert str(found).endswith(
        "but 1 without a rightly signed manifest (first: round 1 of peer 2); 1 with another snapshot than is named "
        "(first: round 2 of peer 0), so not all of it is verified"
    )


def test_a_model_that_was_published_again_is_that_of_its_first_round() -> None:
    found = ancestry(lineage_of(with_peer_2_away().values()), sha256(2, 1))
    assert found is not None
    assert (found.peer, found.round, found.is_whole) == (2, 1, True)
    later = ancestry(lineage_of(with_peer_2_away().values()), sha256(2, 6))
    assert later is not None
    assert later.is_whole
    assert later.rounds[4] == 3
    assert later.rounds[2] == 2
