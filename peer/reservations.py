"""Why a run whose rounds are all done still does not end as complete."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from crad_p2p.results import RoundRecord
from peer.words import name_peers


def reservations(
    history: Sequence[RoundRecord],
    *,
    away: Sequence[int],
    behind: Sequence[int],
    refused: Sequence[int],
    conflicts: Sequence[Path],
    refused_by: Mapping[int, tuple[int, str]],
) -> list[str]:
    """Part sentences, one a reason; none if the run was as it should be.

    Args:
        history: all rounds of this peer.
        away: others whose manifest of the last round never came.
        behind: others that had not said that they have everything when the linger time was over.
        refused: others whose snapshot of the last round, which no line of the history speaks of, was refused.
        conflicts: evidence of peers that published twice.
        refused_by: others that did not use a round of this peer: the last such round, and why.
    """
    reasons = []
    lacking = [record for record in history if record.missing_teachers or record.stale_teachers]
    if lacking:
        missed = sorted({j for record in lacking for j in record.missing_teachers + record.stale_teachers})
        reasons.append(
            f"{len(lacking)} of {len(history)} rounds were trained without the newest model of {name_peers(missed)}"
        )
    if skipped := [number for record in history for number in record.skipped_rounds]:
        rounds = f"{len(skipped)} round{'s' if len(skipped) > 1 else ''}"
        reasons.append(f"the mesh went on without this peer in {rounds}, last in round {skipped[-1]}")
    if away:
        reasons.append(f"{name_peers(away)} had not said that the last round is done there when this peer left")
    if waiting := [j for j in behind if j not in away]:
        reasons.append(f"{name_peers(waiting)} may still need this one (start the same command again to serve it)")
    if quarantined := sorted({j for record in history for j in record.quarantined_teachers}.union(refused)):
        reasons.append(f"snapshots of {name_peers(quarantined)} were refused")
    if refused_by:
        number, why = max(refused_by.values())
        verb = "does" if len(refused_by) == 1 else "do"
        reasons.append(f"{name_peers(sorted(refused_by))} {verb} not use models of this peer (round {number}: {why})")
    if conflicts:
        reasons.append(f"there is evidence that a peer published twice, in {conflicts[0].parent}")
    return reasons
