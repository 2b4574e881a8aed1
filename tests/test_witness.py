"""What is remembered of the others' snapshots, and what contradicts it."""

from __future__ import annotations

from crad_p2p.manifest import ClassStatistics, Consumed, Manifest
from peer.witness import Conflict, Sighting, Witness

A, B, C = (letter * 64 for letter in "abc")


def manifest_of(peer: int, number: int, consumed: dict[tuple[int, int], str]) -> Manifest:
    return Manifest(
        run=C,
        peer=peer,
        round=number,
        arch="cnn6",
        size=1,
        sha256=C,
        statistics=ClassStatistics(counts=(1,), hits=(1,), predicted=(1,)),
        consumed=tuple(Consumed(peer=j, round=r, sha256=sha256) for (j, r), sha256 in consumed.items()),
        model_round=number,
        missing=(),
        quarantined=(),
    )


# --- digests ----------------------------------------------------------------------------------------------------------


def test_one_digest_contradicts_nothing_however_often_it_is_told() -> None:
    witness = Witness({})
    assert witness.compare(2, 5, A, "its own manifest") is None
    assert witness.compare(2, 5, A, "taught round 6 of peer 1") is None
    assert witness.compare(2, 6, B, "its own manifest") is None
    assert witness.compare(3, 5, B, "its own manifest") is None


def test_another_digest_is_a_conflict_with_both_sources_and_the_first_digest_stays() -> None:
    witness = Witness({})
    witness.compare(2, 5, A, "its own manifest")
    for source in ("taught round 6 of peer 1", "taught round 6 of peer 3"):
        assert witness.compare(2, 5, B, source) == Conflict(2, 5, A, "its own manifest", B, source)
    assert witness.compare(2, 5, A, "taught round 6 of peer 4") is None


def test_a_conflict_says_who_and_what() -> None:
    text = str(Conflict(2, 5, A, "its own manifest", B, "taught round 6 of peer 1"))
    assert text == (
        "two different snapshots of round 5 of peer 2 are about: aaaaaaaaaaaa… (its own manifest) and bbbbbbbbbbbb… "
        "(taught round 6 of peer 1); peer 2 has published twice, or one of those who say so is wrong"
    )


def test_all_that_a_round_has_consumed_is_compared() -> None:
    witness = Witness({})
    for peer in (2, 3, 4):
        witness.compare(peer, 5, A, "its own manifest")
    conflicts = witness.compare_consumed(manifest_of(1, 6, {(2, 5): B, (3, 5): A, (4, 5): B, (7, 5): B}))
    assert [(each.peer, each.round, each.second, each.second_source) for each in conflicts] == [
        (2, 5, B, "taught round 6 of peer 1"),
        (4, 5, B, "taught round 6 of peer 1"),
    ]
    # What was news here is known now.
    assert witness.compare(7, 5, A, "its own manifest") == Conflict(
        7, 5, B, "taught round 6 of peer 1", A, "its own manifest"
    )


def test_a_stale_teacher_is_compared_in_its_own_round() -> None:
    witness = Witness({})
    witness.compare(2, 3, A, "its own manifest")
    assert witness.compare_consumed(manifest_of(1, 6, {(2, 3): A})) == []
    assert len(witness.compare_consumed(manifest_of(1, 6, {(2, 3): B}))) == 1


def test_what_was_seen_before_the_last_start_counts() -> None:
    witness = Witness({2: Sighting(5, A)})
    found = witness.compare(2, 5, B, "its own manifest")
    assert found == Conflict(2, 5, A, "seen here before the last start", B, "its own manifest")


def test_digests_of_rounds_long_past_are_forgotten() -> None:
    witness = Witness({})
    for number in range(10):
        witness.compare(2, number, A, "its own manifest")
    witness.forget_before(lambda _peer: 7)
    assert [number for number in range(10) if witness.compare(2, number, B, "later")] == [7, 8, 9]


# --- sightings --------------------------------------------------------------------------------------------------------


def test_the_newest_snapshot_is_remembered() -> None:
    witness = Witness({2: Sighting(5, A)})
    assert witness.saw(2, 6, B)
    assert witness.sightings == {2: Sighting(6, B)}
    assert witness.saw(3, 0, C)
    assert witness.sightings == {2: Sighting(6, B), 3: Sighting(0, C)}


def test_neither_an_older_snapshot_nor_another_one_of_the_same_round_replaces_it() -> None:
    witness = Witness({2: Sighting(5, A)})
    assert not witness.saw(2, 4, B)
    assert not witness.saw(2, 5, B)
    assert not witness.saw(2, 5, A)
    assert witness.sightings == {2: Sighting(5, A)}


def test_what_is_given_at_the_start_is_not_changed() -> None:
    given = {2: Sighting(5, A)}
    Witness(given).saw(2, 6, B)
    assert given == {2: Sighting(5, A)}


def test_who_says_less_than_has_been_here_is_behind() -> None:
    witness = Witness({2: Sighting(5, A)})
    assert [number for number in range(-1, 8) if witness.is_behind(2, number)] == [-1, 0, 1, 2, 3, 4]
    assert not witness.is_behind(3, -1)
