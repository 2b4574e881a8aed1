"""Every other peer: can it be reached, does it run the same, and has it reached this one?"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from crad_p2p.errors import ExitCode, IncompleteError
from crad_p2p.foreign import printable
from launch.preflight.greet import Caller, Greeting, NoAnswerError, WrongAnswerError, greet, state_of
from peer._proto.crad.v1 import peer_pb2
from peer.certificates import certificate_from_der, issued_text, issuer_of
from peer.exchange import refuse_rollback
from peer.findings import Finding, failed_by, failure, ok, warning
from peer.hello import describe_data_difference
from peer.store import Store
from peer.words import is_cut_off, name_peers

#: Seconds between two tries.
_PAUSE = 0.5
#: Seconds in which a running peer surely says what data it has, should the wait be over.
_LATE = 2.0


@dataclass
class Other:
    """What is known of one other peer.

    Attributes:
        greeting: its answer, if it was in order.
        reason: why it was not reached at the last try.
        wrong: what is wrong with whoever answers.
        state: what it does, if it said that; with its data, if those here are known.
    """

    peer: int
    address: str
    greeting: Greeting | None = None
    reason: str = ""
    wrong: WrongAnswerError | None = None
    state: peer_pb2.PeerState | None = None

    @property
    def is_up(self) -> bool:
        """Somebody is there who should call back."""
        return self.greeting is not None


async def look_at(
    other: Other, caller: Caller, own_data: asyncio.Future[peer_pb2.Data | None], deadline: float
) -> None:
    """Try to reach a peer until a time of the loop, at least once; then compare data, once they are known here."""
    clock = asyncio.get_running_loop().time
    while other.greeting is None:
        try:
            other.greeting = await greet(caller, other.peer, other.address)
        except WrongAnswerError as error:
            other.wrong = error
            return
        except NoAnswerError as error:
            other.reason = str(error)
            if clock() >= deadline:
                return
            await asyncio.sleep(min(_PAUSE, max(0.0, deadline - clock())))
    compares = await asyncio.shield(own_data) is not None
    seconds = max(_LATE, deadline - clock())
    other.state = await state_of(caller, other.peer, other.address, seconds, with_data=compares)


def judge(
    other: Other,
    caller: Caller,
    store: Store,
    own_data: peer_pb2.Data | None,
    *,
    has_called: bool,
    wait: float,
    is_running: bool = False,
) -> Finding:
    """The line for one peer.

    Args:
        has_called: it has called here, while this check listened.
        is_running: this peer runs, so that the other one should reach it.
    """
    what, peer = f"peer {other.peer}", other.peer
    if other.wrong is not None:
        return failure(what, other.wrong.exit_code, f"{other.address}: {other.wrong}", other.wrong.remedy)
    if other.greeting is None:
        if has_called:
            return failure(
                what,
                ExitCode.INCOMPLETE,
                f"{other.address} cannot be reached from here ({other.reason}), though that peer has called here",
                "see that this is its address, that its firewall lets calls in, and this one lets them out",
            )
        return warning(
            what,
            f"{other.address} has not been reached in {wait:g} s ({other.reason})",
            f"if peer {peer} runs, see to its address and the firewalls; otherwise check again when it does",
        )
    try:
        refuse_rollback(store, peer, other.greeting.reply, caller.federation)
    except IncompleteError as error:
        return failed_by(what, error)
    data = ""
    if own_data is not None and other.state is not None:
        if difference := describe_data_difference(other.state.data, own_data, peer, caller.own_id):
            return failure(what, ExitCode.PEERS_DISAGREE, f"{other.address}: {difference}")
        data = " and data"
    who = "answers, being checked, too" if other.greeting.is_check else "answers"
    said = (
        f"{other.address} {who}: same version, federation{data}; round trip {1000 * other.greeting.round_trip:.0f} ms, "
        f"clock {_clock(other.greeting.ahead)}{_certificate(other.greeting.reply, caller)}"
    )
    if is_running and not other.greeting.is_check and other.state and is_cut_off(other.state.explanation):
        return warning(
            what,
            f"{said}; but it says: {printable(other.state.explanation, 200)}",
            "its log says what stands in the way there; the address in its file, most often, or a firewall",
        )
    return ok(what, said)


def _certificate(reply: peer_pb2.HelloReply, caller: Caller) -> str:
    """By which CA the peer has its certificate of now, so that one sees when nobody needs an old CA any more."""
    if caller.tls is None:
        return ""
    certificate = certificate_from_der(reply.certificate)  # checked when it came
    return f"; certificate {issued_text(certificate, issuer_of(certificate, caller.tls.authorities))}"


def _clock(ahead: float) -> str:
    """Nothing depends on it, so it is never wrong."""
    if abs(ahead) < 1:
        return "right to a second"
    return f"{abs(ahead):.0f} s {'ahead' if ahead > 0 else 'behind'}, which does no harm"


def judge_calls(others: Sequence[Other], callers: Collection[int], listen: str, wait: float) -> Finding:
    """Have those that are up reached this peer?"""
    what = "reachable"
    up = [other.peer for other in others if other.is_up]
    if silent := [peer for peer in up if peer not in callers]:
        is_one = len(silent) == 1
        return warning(
            what,
            f"{name_peers(silent)} {'is' if is_one else 'are'} up, and {'has' if is_one else 'have'} not called "
            f"{listen} within {wait:g} s",
            f"see that the address of this peer in {'its' if is_one else 'their'} federation file leads here, through "
            f"firewall and NAT",
        )
    if not callers and (wrong := [other for other in others if other.wrong is not None]):
        return _nobody_fits(wrong, listen)
    if not callers:
        return warning(
            what, f"nobody is up who could call {listen}", "check again when another peer runs, or is checked"
        )
    return ok(what, f"{name_peers(sorted(callers))} {'has' if len(callers) == 1 else 'have'} called {listen}")


def _nobody_fits(wrong: Sequence[Other], listen: str) -> Finding:
    """Others are up, and neither can they call here nor be called."""
    named = name_peers(other.peer for other in wrong)
    strangers = [other.peer for other in wrong if other.wrong and other.wrong.exit_code is ExitCode.CERTIFICATE]
    if not strangers:
        runs = "answers, but runs" if len(wrong) == 1 else "answer, but run"
        return warning("reachable", f"{named} {runs} something else (see above), and nobody else has called {listen}")
    return warning(
        "reachable",
        f"nobody has called {listen}: something answers at the address of {named}, but with a certificate that is not "
        f"trusted here, or without trust in this one (see above)",
        f"ask the site of {name_peers(strangers)}, and whoever runs the CA, which CA is right",
    )


def judge_refusals(counts: Mapping[tuple[str, str], int], addresses: Mapping[tuple[str, str], str]) -> Finding:
    """Somebody called who must not.

    Args:
        addresses: the last one from which each of them came, where that is known.
    """
    said = ", ".join(
        f"{who}{f' at {addresses[who, reason]}' if (who, reason) in addresses else ''}: {reason}"
        for who, reason in sorted(counts)
    )
    return warning("refused", f"calls were refused here ({said})", "see who else uses this address, or this CA")
