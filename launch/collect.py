"""The results of a local mesh, read from the state directories of its peers."""

from __future__ import annotations

from pathlib import Path

from crad_p2p.durable import write_file
from crad_p2p.federation import Federation
from crad_p2p.results import PeerResult, RoundRecord, Summary, mean, total
from launch.mesh import peer_dir
from peer.store import Store


def collect(federation: Federation, out: Path, wall_seconds: float) -> tuple[Summary, list[RoundRecord]]:
    """Summary and history of a mesh, complete or not, after its peers have ended."""
    stores = {peer: Store(peer_dir(out, peer)) for peer in federation.ids}
    history = [record for store in stores.values() for record in store.history()]
    results = {peer: store.result() for peer, store in stores.items()}
    peers = tuple(results[peer] or _unfinished(federation, peer, history) for peer in federation.ids)
    best = {store.load_best().round for store in stores.values()}
    complete = all(results.values())
    summary = Summary(
        federation=federation.federation,
        config_digest=federation.digest(),
        method=federation.method.name,
        transport="grpc",
        rounds=federation.rounds,
        complete=complete,
        best_round=best.pop() if complete and len(best) == 1 else None,
        mean_global_accuracy=mean(result.global_accuracy for result in peers),
        mean_local_accuracy=mean(result.local_accuracy for result in peers),
        wall_seconds=wall_seconds,
        peers=peers,
    )
    return summary, history


def write_results(out: Path, summary: Summary, history: list[RoundRecord]) -> Path:
    """Write summary.json and history.jsonl (by round, then peer); the path of summary.json."""
    ordered = sorted(history, key=lambda record: (record.round, record.peer))
    write_file(out / "history.jsonl", "".join(record.to_line() for record in ordered))
    path = out / "summary.json"
    summary.write(path)
    return path


def _unfinished(federation: Federation, peer: int, history: list[RoundRecord]) -> PeerResult:
    """The entry of a peer that did not get to its last round: what its history tells."""
    own = [record for record in history if record.peer == peer]
    result = PeerResult(
        id=peer,
        arch=federation.peer(peer).arch,
        train_samples=0,
        rounds_completed=own[-1].round if own else 0,
        snapshot_sha256=own[-1].snapshot_sha256 if own else "",
    )
    return total(own, result)
