"""summary.json and history.jsonl, the common best round, and totals over a history."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from pathlib import Path

import pytest

from crad_p2p.manifest import ClassStatistics, Manifest
from crad_p2p.results import (
    BestRound,
    PeerResult,
    RoundRecord,
    Seconds,
    Summary,
    mean,
    mean_validation_accuracy,
    total,
)

# ----------------------------------------------------------------------------------------------------- the common round


def manifest(peer: int, number: int, hits: int, count: int = 10) -> Manifest:
    return Manifest(
        run="0" * 64,
        peer=peer,
        round=number,
        arch="cnn6",
        size=1,
        sha256="0" * 64,
        statistics=ClassStatistics(counts=(count,), hits=(hits,), predicted=(0,)),
        consumed=(),
        model_round=number,
        missing=(),
        quarantined=(),
    )


def offer_all(rounds: dict[int, list[tuple[int, int]]]) -> BestRound:
    """Offer rounds of (hits, samples), one a peer."""
    best = BestRound()
    for number, peers in rounds.items():
        best.offer(number, [manifest(peer, number, hits, count) for peer, (hits, count) in enumerate(peers)])
    return best


def test_the_highest_mean_wins_and_the_first_of_equals() -> None:
    best = BestRound()
    answers = [
        best.offer(number, [manifest(0, number, hits)]) for number, hits in enumerate([3, 5, 5, 4, 7, 7], start=1)
    ]
    assert answers == [True, True, False, False, True, False]
    assert (best.round, best.accuracy) == (5, pytest.approx(0.7))


def test_the_start_is_not_eligible() -> None:
    best = BestRound()
    assert not best.offer(0, [manifest(0, 0, 10)])
    assert (best.round, best.accuracy) == (None, None)
    assert best.offer(1, [manifest(0, 1, 0)])  # an accuracy of nothing still beats no round
    assert best.round == 1
    assert not best.offer(2, [manifest(0, 2, 0)])


def test_peers_count_alike_whatever_their_samples() -> None:
    # Pooled, round 1 would win: 10 of 110 against 9 of 110.
    assert offer_all({1: [(0, 10), (10, 100)], 2: [(5, 10), (4, 100)]}).round == 2
    assert offer_all({1: [(10, 10), (0, 10)], 2: [(4, 10), (5, 10)]}).round == 1


def test_a_peer_without_validation_samples_is_left_out() -> None:
    best = offer_all({1: [(0, 0), (6, 10)], 2: [(0, 0), (7, 10)], 3: [(0, 0), (7, 10)]})
    assert (best.round, best.accuracy) == (2, pytest.approx(0.7))


def test_without_any_validation_sample_it_is_the_first_round() -> None:
    best = offer_all({1: [(0, 0), (0, 0)], 2: [(0, 0), (0, 0)]})
    assert (best.round, best.accuracy) == (1, 0.0)
    assert offer_all({1: [(0, 0), (0, 0)], 2: [(0, 0), (1, 10)]}).round == 2


def test_the_order_of_the_manifests_does_not_matter() -> None:
    draw = random.Random(1)
    peers = [(draw.randint(0, 97), draw.choice([97, 89, 83])) for _ in range(7)]
    peers = [(min(hits, count), count) for hits, count in peers]
    manifests = [manifest(peer, 1, *numbers) for peer, numbers in enumerate(peers)]
    accuracies = set()
    for _ in range(50):
        draw.shuffle(manifests)
        best = BestRound()
        assert best.offer(1, manifests)
        accuracies.add(best.accuracy)
    assert len(accuracies) == 1
    # 0.1 + 0.2 + 0.3 depends on the order of the sum: two rounds with the same numbers must still tie.
    for one, two in itertools.permutations(itertools.permutations([(1, 10), (2, 10), (3, 10)]), 2):
        assert offer_all({1: list(one), 2: list(two)}).round == 1


def test_a_missing_peer_stands_with_its_newest_older_manifest() -> None:
    best = BestRound()
    assert best.offer(1, [manifest(0, 1, 5), manifest(1, 1, 1)])
    assert best.offer(2, [manifest(0, 2, 6), manifest(1, 1, 1)])
    assert (best.round, best.accuracy) == (2, pytest.approx(0.35))


def test_means() -> None:
    assert mean([]) is None
    assert mean([None, None]) is None
    assert mean([0.25, None, 0.75]) == 0.5
    assert mean([0.0, None]) == 0.0
    assert mean(value for value in (0.1, 0.2, 0.3)) == pytest.approx(0.2)
    assert mean_validation_accuracy([]) is None
    statistics = [ClassStatistics(counts=(n,), hits=(h,), predicted=(0,)) for n, h in ((4, 1), (0, 0), (2, 2))]
    assert mean_validation_accuracy(statistics) == pytest.approx(0.625)


# ------------------------------------------------------------------------------------------------------------ the files


def record(peer: int = 3, number: int = 7, **fields: object) -> RoundRecord:
    return RoundRecord(
        **{  # type: ignore[arg-type]
            "peer": peer,
            "round": number,
            "snapshot_sha256": "ab" * 32,
            "validation_accuracy": 0.1 + 0.2,
            "global_accuracy": 1 / 3,
            "train_loss": 1e-17,
            "target_mass": 0.9,
            "target_collapsed": 0.0,
            "target_top1": 1.0,
            "teachers": (0, 1, 2),
            "missing_teachers": (4,),
            "stale_teachers": (1,),
            "quarantined_teachers": (5, 6),
            "seconds": Seconds(0.1, 0.2, 0.3, 0.4, 0.5, 0.6),
            "bytes_sent": 2**40,
            "bytes_received": 12,
            **fields,
        }
    )


def test_history_lines_round_trip() -> None:
    for each in (record(), RoundRecord(0, 1, "00" * 32, None)):
        line = each.to_line()
        assert line.endswith("\n")
        assert line.count("\n") == 1
        assert RoundRecord.from_line(line) == each
        assert RoundRecord.from_line(line).to_line() == line
    tree = json.loads(record().to_line())
    assert tree["seconds"]["commit"] == 0.6
    assert tree["teachers"] == [0, 1, 2]
    assert set(tree) == {field.name for field in dataclasses.fields(RoundRecord)}
    assert record() != record(bytes_sent=1)


def peer_result(peer: int = 0, **fields: object) -> PeerResult:
    return PeerResult(
        **{  # type: ignore[arg-type]
            "id": peer,
            "arch": "cnn6",
            "train_samples": 100,
            "rounds_completed": 3,
            "snapshot_sha256": "cd" * 32,
            "global_accuracy": 0.1,
            "local_accuracy": None,
            "global_accuracy_per_class": (0.5, None, 1.0),
            "counts": (2, 0, 1),
            "hits": (1, 0, 1),
            "seconds": Seconds(1, 2, 3, 4, 5, 6),
            "bytes": {"sent": 5, "received": 6},
            "peak_rss_bytes": 2**33,
            "missing_teachers": (1,),
            "stale_teachers": (),
            "quarantined_teachers": (2, 3),
            **fields,
        }
    )


def summary(**fields: object) -> Summary:
    return Summary(
        **{  # type: ignore[arg-type]
            "federation": "colon-demo",
            "config_digest": "0" * 64,
            "method": "crad",
            "transport": "grpc",
            "rounds": 3,
            "complete": True,
            "best_round": 2,
            "mean_global_accuracy": 0.1 + 0.2,
            "mean_local_accuracy": None,
            "wall_seconds": 12.5,
            "peers": (peer_result(0), peer_result(1, bytes={"sent": 0, "received": 0})),
            **fields,
        }
    )


def test_summaries_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    for each in (summary(), summary(complete=False, best_round=None, mean_global_accuracy=None, peers=())):
        each.write(path)
        assert Summary.read(path) == each
    assert [entry.name for entry in tmp_path.iterdir()] == ["summary.json"]


def test_the_summary_has_the_promised_fields(tmp_path: Path) -> None:
    """Names and nesting of DESIGN section 7: other programs read them."""
    path = tmp_path / "summary.json"
    summary().write(path)
    tree = json.loads(path.read_text())
    assert list(tree) == [
        *("federation", "config_digest", "method", "transport", "rounds", "complete", "best_round"),
        *("mean_global_accuracy", "mean_local_accuracy", "wall_seconds", "peers"),
    ]
    (entry, _) = tree["peers"]
    assert list(entry) == [
        *("id", "arch", "train_samples", "rounds_completed", "snapshot_sha256", "global_accuracy", "local_accuracy"),
        *("global_accuracy_per_class", "counts", "hits", "seconds", "bytes", "peak_rss_bytes"),
        *("missing_teachers", "stale_teachers", "quarantined_teachers", "quarantine_reasons", "skipped_rounds"),
        *("best_round", "teacher_precision", "peak_global_accuracy", "peak_local_accuracy"),
    ]
    assert list(entry["seconds"]) == ["wait", "transfer", "teachers", "train", "validate", "commit"]
    assert list(entry["bytes"]) == ["sent", "received"]
    assert entry["global_accuracy_per_class"] == [0.5, None, 1.0]


# --------------------------------------------------------------------------------------------------------------- totals


def test_seconds_add_field_by_field() -> None:
    assert Seconds(1, 2, 3, 4, 5, 6) + Seconds(10, 20, 30, 40, 50, 60) == Seconds(11, 22, 33, 44, 55, 66)
    assert Seconds() + Seconds(wait=1) == Seconds(wait=1)


def test_totals_over_a_history() -> None:
    history = [
        record(number=1, bytes_sent=1, bytes_received=10, missing_teachers=(4, 2), stale_teachers=()),
        record(number=2, bytes_sent=2, bytes_received=20, missing_teachers=(2,), stale_teachers=(9, 1)),
        record(number=3, bytes_sent=4, bytes_received=40, missing_teachers=(), quarantined_teachers=()),
    ]
    result = total((each for each in history), peer_result(seconds=Seconds(wait=99), missing_teachers=(77,)))
    assert result.seconds.commit == pytest.approx(1.8)
    assert result.seconds.wait == pytest.approx(0.3)
    assert result.bytes == {"sent": 7, "received": 70}
    assert result.missing_teachers == (2, 4)
    assert result.stale_teachers == (1, 9)
    assert result.quarantined_teachers == (5, 6)
    unchanged = (
        "id",
        "arch",
        "train_samples",
        "snapshot_sha256",
        "global_accuracy",
        "counts",
        "hits",
        "peak_rss_bytes",
    )
    for name in unchanged:
        assert getattr(result, name) == getattr(peer_result(), name)


def test_totals_without_a_history() -> None:
    result = total([], peer_result())
    assert result.seconds == Seconds()
    assert result.bytes == {"sent": 0, "received": 0}
    assert result.missing_teachers == result.stale_teachers == result.quarantined_teachers == ()
