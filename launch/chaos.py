"""``crad-mesh chaos``: real peers, real faults, and a check of what is left.

Every peer reaches every other through a link of its own (``launch.proxy``), so that any pair can be parted. While the
plan's faults hit them (``launch.faults``), killed peers are started again. Then everything is mended, the run goes on
to its end, and the histories are checked (``launch.checker``).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from crad_p2p.errors import CradError, ExitCode, IncompleteError, error_of
from crad_p2p.federation import Federation
from launch.authority import throwaway
from launch.children import environment
from launch.faults import Fault, plan
from launch.forking import fork_server
from launch.mesh import last_words, peer_dir, tls_dir
from launch.proxy import Proxy
from launch.quick import write_federation
from peer.store import Store
from peer.waiting import within

#: Seconds in which all peers must have finished once nothing goes wrong any more, beside those for the rounds left.
_SETTLE, _A_ROUND = 120.0, 10.0
#: Seconds between two looks at how far the rounds are.
_LOOK = 0.05
#: Seconds that a fault whose time has come waits for the rounds, which a busy machine makes slowly.
_PATIENCE = 30.0
#: Seconds that a fault waits for a process to hit: longer than a killed peer stays away.
_WAIT = 6.0
#: Seconds after which those who have finished come back for one that has not.
_STRANDED = 15.0
#: Bytes a second of a slow link.
_SLOW = 50_000
_FINISHED = (ExitCode.COMPLETE, ExitCode.RESERVATIONS)


@dataclass
class Report:
    """What a run was put through.

    Attributes:
        reached: of each fault, the round that every peer had published when it came (under policy ``quorum`` as many
            peers as a round needs), -1 for none.
        missed: kills and stops that found no process.
        deaths: services that ended by a signal that was not sent to them here, a sentence each.
    """

    faults: Counter[str] = field(default_factory=Counter)
    reached: list[int] = field(default_factory=list)
    missed: int = 0
    deaths: list[str] = field(default_factory=list)
    faulty_seconds: float = 0.0
    settling_seconds: float = 0.0
    starts: Counter[int] = field(default_factory=Counter)
    endings: dict[int, int] = field(default_factory=dict)

    def too_little(self, rounds: int, faults: int) -> str | None:
        """Why the run shows too little, if it does."""
        tried = len(self.reached)
        if tried < faults:
            return f"all {rounds} rounds were done after {tried} of {faults} faults; give more --rounds"
        least = 1 if rounds > 3 else 0  # shorter runs are nearly over when round 1 is published
        late = sum(number >= least for number in self.reached)
        if late < faults // 2:
            return (
                f"only {late} of {faults} faults came after round {least} was published by all peers that a round "
                f"needs; give more --rounds or fewer --faults, or use a quieter machine"
            )
        return None


class Chaos:
    """One run.

    Args:
        federation: with addresses on loopback.
        faults: how many of the plan's faults there are. Each comes at its time; earlier if the rounds would be over
            before all have come, so every one of them hits a run that is not done, however fast the machine is; and
            later if the rounds are far behind, so they do not all hit the first one, however slow it is.
        note: called with a line for the user.
    """

    def __init__(
        self, federation: Federation, out: Path, *, seed: int, faults: int, note: Callable[[str], None]
    ) -> None:
        self._federation = federation
        self._out = out
        self._seed = seed
        self._faults = faults
        self._note = note
        self._links: dict[tuple[int, int], Proxy] = {}
        self._services: dict[int, asyncio.subprocess.Process] = {}
        self._sent: set[tuple[int, int]] = set()  # process id and signal, of those that end a process
        self._stopped: Counter[int] = Counter()  # process ids, and how many stops last there
        self._broken: dict[Proxy, list[Fault]] = defaultdict(list)  # the cuts that last there
        self._away: dict[int, float] = {}  # peer -> until when it is not started again
        self._all_ended = asyncio.Event()
        self._forking: dict[str, str] = {}
        self.report = Report()

    async def run(self) -> Report:
        """Run to the end.

        Raises:
            IncompleteError: the peers did not finish though nothing was wrong any more.
            CradError: a peer ended with an error of its own.
        """
        async with contextlib.AsyncExitStack() as stack:
            self._forking = await stack.enter_async_context(fork_server(self._out, self._note))
            for i in self._federation.ids:
                for j in self._federation.ids:
                    if i != j:
                        proxy = Proxy(self._federation.peer(j).address)
                        self._links[i, j] = await stack.enter_async_context(proxy)
            for peer in self._federation.ids:
                self._write_view(peer)
            throwaway(self._out / "tls", self._federation.federation, self._federation.ids)
            try:
                async with asyncio.TaskGroup() as group:
                    peers = [group.create_task(self._keep(peer)) for peer in self._federation.ids]
                    await self._disturb()
                    await self._settle(peers)
            except* CradError as errors:
                first = errors.exceptions[0]
                assert isinstance(first, CradError)
                raise first from None
            finally:
                await self._end_all()
        return self.report

    def _write_view(self, peer: int) -> None:
        """The federation as this peer sees it: every other one behind a link."""
        entries = tuple(
            entry
            if entry.id == peer
            else entry.model_copy(update={"address": f"127.0.0.1:{self._links[peer, entry.id].port}"})
            for entry in self._federation.peers
        )
        folder = peer_dir(self._out, peer)
        folder.mkdir(parents=True)
        write_federation(self._federation.model_copy(update={"peers": entries}), folder / "peers.yaml")

    # --- peers -----------------------------------------------------------------------------------------------------

    async def _keep(self, peer: int) -> None:
        """Start a peer, and again whenever it is killed, until it has finished; and until all have."""
        while True:
            self.report.starts[peer] += 1
            process = self._services[peer] = await self._start(peer)
            back = peer in self.report.endings  # for another one; it stays no longer than that one takes
            if back:
                await self._until_all_ended(process)
            status = await process.wait()
            if status < 0 and (process.pid, -status) not in self._sent:
                name = signal.Signals(-status).name
                self.report.deaths.append(f"the service of peer {peer} ended by {name}, which nobody had sent to it")
                self._note(self.report.deaths[-1])
            if back and self._all_ended.is_set():
                return
            if status > 0 and status not in _FINISHED:
                raise error_of(status, f"peer {peer} ended: {last_words(self._out, peer, status)}")
            if status in _FINISHED:
                self.report.endings.setdefault(peer, status)
                if len(self.report.endings) == len(self._federation.ids):
                    self._all_ended.set()
                if not await self._is_needed(peer):
                    return
            await asyncio.sleep(max(0.0, self._away.pop(peer, 0.0) - time.monotonic()))

    async def _until_all_ended(self, process: asyncio.subprocess.Process) -> None:
        waits = [asyncio.ensure_future(process.wait()), asyncio.ensure_future(self._all_ended.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if process.returncode is None:
                self._sent.add((process.pid, signal.SIGTERM))
                process.terminate()
                await process.wait()
        finally:
            for task in waits:
                task.cancel()

    async def _is_needed(self, peer: int) -> bool:
        """Whether a peer that has finished is to be started again.

        Under policy ``quorum`` the others may have finished and left while one was away; as docs/quorum.md says, they
        are started again for it.
        """
        while True:
            before = len(self.report.endings)
            try:
                await within(_STRANDED, self._all_ended.wait())
            except TimeoutError:
                if self._federation.barrier.policy == "quorum" and len(self.report.endings) == before:
                    self._note(f"peer {peer} is started again for one that has not finished")
                    return True
            else:
                return False

    async def _start(self, peer: int) -> asyncio.subprocess.Process:
        folder = peer_dir(self._out, peer)
        command = [sys.executable, "-P", "-m", "peer", "--id", str(peer), "--peers", str(folder / "peers.yaml")]
        command += [
            "--state-dir",
            str(folder),
            "--tls-dir",
            str(tls_dir(self._out, peer)),
            "--threads",
            "1",
            "--device",
            "cpu",
        ]
        with (folder / "log.txt").open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                # One that is stopped would not act on a milder signal.
                env={**environment(signal.SIGKILL), **self._forking},
            )

    def _pids(self, peer: int, how: str) -> list[int]:
        """The peer's processes, as far as they run."""
        folder = peer_dir(self._out, peer)
        names = ("service", "learner") if how == "both" else (how,)
        return [pid for name in names if (pid := _pid_of(folder / f"{name}.pid", folder))]

    def _last_rounds(self) -> list[int]:
        return [Store(peer_dir(self._out, peer)).last_round() for peer in self._federation.ids]

    # --- faults ----------------------------------------------------------------------------------------------------

    async def _disturb(self) -> None:
        """Let the plan happen."""
        start = time.monotonic()
        async with asyncio.TaskGroup() as inflicted:
            for k, fault in enumerate(islice(plan(self._federation.ids, self._seed), self._faults)):
                await self._until(time.monotonic() + fault.after, 1 + k * (self._federation.rounds - 2) // self._faults)
                if min(self._last_rounds()) == self._federation.rounds:
                    break
                rounds = self._last_rounds()
                self.report.reached.append(self._reached())
                self._note(f"{time.monotonic() - start:5.1f} s, {span(min(rounds), max(rounds))}: {fault}")
                inflicted.create_task(self._inflict(fault))
        self._mend()
        self.report.faulty_seconds = time.monotonic() - start

    async def _until(self, due: float, number: int) -> None:
        """Until somebody has published this round; or until it is time and the mesh has come half as far."""
        while max(self._last_rounds()) < number:
            late = time.monotonic() - due
            if late >= _PATIENCE or (late >= 0 and self._reached() >= number // 2):
                return
            await asyncio.sleep(_LOOK if late >= 0 else min(_LOOK, -late))

    def _reached(self) -> int:
        """The round that every peer has published, under policy quorum as many as a round needs; -1 for none."""
        barrier, rounds = self._federation.barrier, sorted(self._last_rounds(), reverse=True)
        return rounds[(barrier.quorum(len(rounds))[0] if barrier.policy == "quorum" else len(rounds)) - 1]

    async def _inflict(self, fault: Fault) -> None:
        """Do it, and undo it when its time is over, if no other fault still lasts there."""
        if fault.kind == "cut":
            self.report.faults["cut"] += 1
            links = list(self._parted(fault))
            for link in links:
                self._broken[link].append(fault)
                _break(link, fault.how)
            await asyncio.sleep(fault.lasts)
            for link in links:
                self._broken[link].remove(fault)
                link.heal()
                for other in self._broken[link]:
                    _break(link, other.how)
            return
        pids = await self._processes(fault)
        if not pids:
            self.report.missed += 1
            return
        self.report.faults[fault.kind] += 1
        if fault.kind == "kill":
            if fault.how != "learner":
                self._away.update(dict.fromkeys(fault.peers, time.monotonic() + fault.lasts))
            for pid in pids:
                self._sent.add((pid, signal.SIGKILL))
                _signal(pid, signal.SIGKILL)
            return
        for pid in pids:
            self._stopped[pid] += 1
            _signal(pid, signal.SIGSTOP)
        await asyncio.sleep(fault.lasts)
        for pid in pids:
            self._stopped[pid] -= 1
            if not self._stopped[pid] and _belongs(pid, self._out):
                _signal(pid, signal.SIGCONT)

    async def _processes(self, fault: Fault) -> list[int]:
        """What a kill or stop hits; waited for, if nothing of it is there just now."""
        deadline = time.monotonic() + _WAIT
        while True:
            pids = [pid for peer in fault.peers for pid in self._pids(peer, fault.how)]
            if pids or time.monotonic() > deadline:
                return pids
            await asyncio.sleep(_LOOK)

    def _parted(self, fault: Fault) -> Iterator[Proxy]:
        for (i, j), link in self._links.items():
            inside = (i in fault.peers, j in fault.peers)
            if all(inside) if fault.pair else inside[0] != inside[1]:
                yield link

    def _mend(self) -> None:
        """Nothing is wrong any more."""
        self._away.clear()
        for link in self._links.values():
            link.heal()
        for pid in self._stopped:
            if _belongs(pid, self._out):
                _signal(pid, signal.SIGCONT)

    async def _settle(self, peers: list[asyncio.Task[None]]) -> None:
        start, left = time.monotonic(), self._federation.rounds - max(0, min(self._last_rounds()))
        seconds = _SETTLE + left * _A_ROUND
        self._note(f"mended; {left} rounds are left, {seconds:.0f} s at most")
        try:
            await within(seconds, _all(peers))
        except TimeoutError:
            raise IncompleteError(
                f"the peers did not finish within {seconds:.0f} s after everything was mended; their last rounds are "
                f"{self._last_rounds()}. Their logs and recorded events are in {self._out / 'peers'}"
            ) from None
        self.report.settling_seconds = time.monotonic() - start

    async def _end_all(self) -> None:
        """Whatever happened: leave no process."""
        self._mend()
        for process in self._services.values():
            if process.returncode is None:
                process.kill()
                await process.wait()


def span(first: int, last: int) -> str:
    """Two last rounds in words."""
    if last < 0:
        return "before round 0"
    return f"round {last}" if max(0, first) == last else f"rounds {max(0, first)} to {last}"


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _break(link: Proxy, how: str) -> None:
    match how:
        case "silent":
            link.cut()
        case "half-open":
            link.down.swallows = True
        case "reset":
            link.refuse()
            link.reset()
        case "slow":
            link.up.bandwidth = link.down.bandwidth = _SLOW


async def _all(tasks: list[asyncio.Task[None]]) -> None:
    await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)


def _pid_of(path: Path, folder: Path) -> int | None:
    """The process of a .pid file, if it still is one of this folder's."""
    try:
        pid = int(path.read_text())
    except (OSError, ValueError):
        return None
    return pid if _belongs(pid, folder) else None


def _belongs(pid: int, folder: Path) -> bool:
    """Whether a process is one of this run's; ids are used again."""
    try:
        return str(folder) in Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return False
