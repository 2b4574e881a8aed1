"""``crad-mesh check``: everything that can be known to stand in the way of a peer, before its first round."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, aclosing

from rich.console import Console
from rich.table import Table
from rich.text import Text

from crad_p2p.errors import CertificateError, CradError, ExitCode, PortTakenError
from crad_p2p.federation import Federation, is_loopback
from crad_p2p.foreign import printable
from launch.preflight.greet import Caller, NoAnswerError, WrongAnswerError, greet, state_of
from launch.preflight.here import check_certificate, check_state, describe_federation
from launch.preflight.learner import ask_learner, data_message, describe_data, describe_failure
from launch.preflight.others import Other, judge, judge_calls, judge_refusals, look_at
from launch.preflight.probe import Probe
from peer._proto.crad.v1 import peer_pb2
from peer.binding import why_not_bound
from peer.channels import require_loopback
from peer.findings import Finding, Level, failed_by, failure, ok, warning
from peer.host import Host
from peer.proxies import check_proxies
from peer.store import Store
from peer.tls import Tls
from peer.words import is_cut_off

_STYLES = {Level.OK: "green", Level.WARNING: "bold yellow", Level.FAILURE: "bold red"}
#: Seconds for which another check may be later than this one.
_LATE = 3.0
#: Seconds for a running peer to say what it does.
_ASK = 4.0
#: Characters of the first two columns.
_LEVEL, _WHAT = 7, 11


class Check:
    """One run of all checks.

    Args:
        wait: seconds for which other peers are tried, and waited for.
        environment: where proxy variables are looked for.
    """

    def __init__(
        self, federation: Federation, host: Host, wait: float, environment: Mapping[str, str] = os.environ
    ) -> None:
        self._federation = federation
        self._host = host
        self._id = host.peer_id
        self._wait = wait
        self._environment = environment
        self._store = Store(host.state_dir)
        self._tls: Tls | None = None
        self.holder: str | None = None  # the process in which this peer is running

    async def findings(self) -> AsyncGenerator[Finding, None]:
        """What is found, in an order that does not change; each as soon as it and those before are known."""
        yield describe_federation(self._federation, self._id)
        transport = self._check_transport()
        yield transport
        state, self.holder = check_state(self._store, self._federation, self._id)
        yield state
        async with AsyncExitStack() as stack:
            can_call = transport.level is not Level.FAILURE
            probe = Probe(self._federation, self._id, self._host.state_dir, self._tls) if can_call else None
            if probe is not None:
                stack.push_async_callback(probe.stop)
            address = await self._check_address(probe)
            yield address
            if self.holder is not None and probe is not None and address.level is Level.OK:
                yield await self._ask_running()
            is_probing = probe is not None and self.holder is None and address.level is Level.OK
            own_data: asyncio.Future[peer_pb2.Data | None] = asyncio.get_running_loop().create_future()
            deadline = asyncio.get_running_loop().time() + self._wait
            others = [Other(entry.id, entry.address) for entry in self._federation.peers if entry.id != self._id]
            others.sort(key=lambda other: other.peer)
            caller = Caller(self._federation, self._id, self._tls)
            looks = []
            if can_call:
                looks = [asyncio.create_task(look_at(other, caller, own_data, deadline)) for other in others]
            stack.push_async_callback(_end, looks)
            data = None
            if self.holder is not None:
                own_data.set_result(None)
                yield ok(
                    "data", "not looked at, nor memory and disk: this peer is running, and has seen to them itself"
                )
            else:
                try:
                    ready, room = await ask_learner(self._federation, self._host)
                except CradError as error:
                    own_data.set_result(None)
                    yield describe_failure(error)
                else:
                    data = data_message(ready)
                    own_data.set_result(data)
                    if probe is not None:
                        probe.show(data)
                    for finding in (describe_data(ready, self._federation, self._id), room.memory, room.disk):
                        yield finding
            if not can_call:
                if others:
                    yield warning("others", "not called: what failed above must be mended before")
                yield check_proxies(self._environment, _unreached(others))
                return
            if looks:
                await asyncio.gather(*looks)
            if is_probing and probe is not None:
                up = {other.peer for other in others if other.is_up}
                await probe.called_by(up, deadline - asyncio.get_running_loop().time())
                if data is not None:  # who is checked at the same time may want to compare, and is a little later
                    checked = {other.peer for other in others if other.greeting and other.greeting.is_check}
                    await probe.told(checked, min(_LATE, deadline - asyncio.get_running_loop().time()))
            callers = probe.callers if is_probing and probe is not None else set()
            for other in others:
                yield judge(
                    other,
                    caller,
                    self._store,
                    data,
                    has_called=other.peer in callers,
                    wait=self._wait,
                    is_running=self.holder is not None,
                )
            if others and is_probing:
                yield judge_calls(others, callers, self._host.listen, self._wait)
            if probe is not None and probe.refusals.counts:
                yield judge_refusals(probe.refusals.counts, probe.refusals.addresses)
            yield check_proxies(self._environment, _unreached(others))

    def _check_transport(self) -> Finding:
        """The certificate, or that none is needed."""
        folder = self._host.tls_dir
        try:
            if folder is None:
                require_loopback(self._federation, self._host.listen)
                return warning(
                    "certificate",
                    "none, since --insecure was given: plain text, which peers with TLS do not take; all addresses are "
                    "of this machine",
                )
            self._tls = Tls(folder, self._federation.federation, self._id)
        except CertificateError as error:
            return failed_by("certificate", error)
        return check_certificate(self._tls.credentials)

    async def _check_address(self, probe: Probe | None) -> Finding:
        """Listen there, unless this peer is running, which is not to be disturbed."""
        what, listen, holder = "address", self._host.listen, self.holder
        if holder is None:
            taken: CradError | None = why_not_bound(listen)
            if taken is None and probe is not None:
                try:
                    await probe.start(listen)
                except CertificateError as error:
                    return failed_by(what, error)
                except PortTakenError as error:
                    taken = error
            if taken is None:
                return ok(what, f"{listen} is free")
            if probe is not None and (who := await self._who_listens()):
                return failure(what, ExitCode.PORT_TAKEN, f"cannot listen on {listen}: {who}")
            return failed_by(what, taken)
        if probe is None:
            return ok(what, f"not looked at: this peer is running (process {holder})")
        try:
            await greet(Caller(self._federation, self._id, self._tls), self._id, _own_end(listen))
        except (NoAnswerError, WrongAnswerError) as error:
            return warning(
                what,
                f"this peer is running (process {holder}), and does not answer at {listen} ({error})",
                "give the check the options of the peer, or wait if it is only starting",
            )
        return ok(what, f"this peer is running (process {holder}), and answers at {listen}")

    async def _ask_running(self) -> Finding:
        """What this very peer, which runs, does or waits for."""
        caller = Caller(self._federation, self._id, self._tls)
        state = await state_of(caller, self._id, _own_end(self._host.listen), _ASK, with_data=False)
        if state is None:
            return warning("running", f"this peer has not said within {_ASK:g} s what it does", "look into its log")
        said = printable(state.explanation, 300) or state.phase
        if is_cut_off(state.explanation):
            return warning("running", f"this peer says: {said}", "see below, and what its log says of them")
        return ok("running", f"this peer says: {said}")

    async def _who_listens(self) -> str | None:
        """Whether it is this peer itself that has the port."""
        try:
            found = await greet(Caller(self._federation, self._id, self._tls), self._id, _own_end(self._host.listen))
        except (NoAnswerError, WrongAnswerError):
            return None
        if found.is_check:
            return f"peer {self._id} is being checked by another 'crad-mesh check'; wait for its end"
        return (
            f"peer {self._id} is running there, with another state directory than {self._host.state_dir}; give that "
            f"with --state-dir, or end it"
        )


def run_check(console: Console, federation: Federation, host: Host, wait: float) -> ExitCode:
    """Check, and print a line for everything that is found; the exit code of the first failure."""
    # What the parts of a peer log here is said by the findings, in their order.
    logging.getLogger("peer").addHandler(logging.NullHandler())

    check = Check(federation, host, wait)

    async def run() -> list[Finding]:
        found = []
        # Closed while the loop runs, also where the output is closed before the end: the probe is a server.
        with console.status("checking …"):
            async with aclosing(check.findings()) as findings:
                async for finding in findings:
                    found.append(finding)
                    show(console, finding)
        return found

    found = asyncio.run(run())
    console.print()
    console.print(Text(verdict(found, host.peer_id, check.holder)), soft_wrap=not console.is_terminal)
    return next((finding.exit_code for finding in found if finding.level is Level.FAILURE), ExitCode.COMPLETE)


def show(console: Console, finding: Finding) -> None:
    """One line; on a terminal folded beside the first columns, else whole, for programs."""
    level = Text(f"{finding.level:<{_LEVEL}}", style=_STYLES[finding.level])
    what, sentence = f"{finding.what:<{_WHAT}}", finding.sentence
    if not console.is_terminal:
        console.print(Text.assemble(level, "  ", what, "  ", sentence), soft_wrap=True)
        return
    line = Table.grid(padding=(0, 2, 0, 0), expand=True)
    line.add_column(width=_LEVEL)
    line.add_column(width=_WHAT)
    line.add_column(ratio=1, overflow="fold")
    line.add_row(level, Text(what), Text(sentence))
    console.print(line)


def verdict(found: list[Finding], peer: int, holder: str | None) -> str:
    """One line for all."""
    failures, warnings = (sum(each.level is level for each in found) for level in (Level.FAILURE, Level.WARNING))
    counts = ((failures, "failure"), (warnings, "warning"))
    said = " and ".join(f"{number} {word}{'s' if number > 1 else ''}" for number, word in counts if number)
    if failures:
        return f"{said}: mend what failed, and check peer {peer} again."
    if holder is not None:
        return f"{said or 'All is well'}: peer {peer} is running."
    return f"{said or 'All is well'}: peer {peer} can be started, by 'crad-peer' with the same options."


def _own_end(listen: str) -> str:
    """Where this machine reaches what listens there."""
    host, _, port = listen.rpartition(":")
    return {"0.0.0.0": "127.0.0.1:", "[::]": "[::1]:"}.get(host, f"{host}:") + port


def _unreached(others: list[Other]) -> list[int]:
    return [other.peer for other in others if not other.is_up and not is_loopback(other.address)]


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
