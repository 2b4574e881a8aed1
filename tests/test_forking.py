"""A forked process is what executing its module gives, and ends with whoever asked for it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from processes import until

import peer.forked
from crad_p2p import forking
from launch.forking import fork_server
from peer.forked import Forked
from peer.learner_process import LearnerProcess

pytestmark = pytest.mark.skipif(not forking.is_supported(), reason="the system does not offer it")

#: What a fork server of these tests becomes. The first argument says what it does.
MODULE = """
import gc, json, os, signal, sys
from pathlib import Path

LATER = ("tarfile", "there_is_no_such_module")
loaded = "tarfile" in sys.modules
MORE

def look():
    names = (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE)
    return {
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "cmdline": os.fsdecode(Path("/proc/self/cmdline").read_bytes().rstrip(b"\\0")).split("\\0"),
        "folder": str(Path.cwd()),
        "environment": dict(os.environ),
        "path": sys.path,
        "files": {n: os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")[:-1] if int(n) > 2},
        "signals": [str(signal.getsignal(name)) for name in names],
        "mask": list(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "wakeup": signal.set_wakeup_fd(-1),
        "collects": gc.isenabled(),
        "safe_path": sys.flags.safe_path,
        "said": sys.stdin.read(),
    }


def main():
    print(os.getpid(), flush=True)
    match sys.argv[1:]:
        case ["look", *_]:
            print(json.dumps(look()))
            print("complained", file=sys.stderr)
        case ["exit", status]:
            sys.exit(json.loads(status))
        case ["raise"]:
            raise RuntimeError("wrong")
        case ["signal", number]:
            os.kill(os.getpid(), int(number))
        case ["wait"]:
            signal.pause()
        case ["employer"]:
            from crad_p2p.parent import employer
            print(employer())


if __name__ == "__main__":
    main()
"""


class Server:
    """A fork server that runs, and what it is asked."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._started: list[Forked] = []

    async def start(self, *arguments: str) -> Forked:
        process = await Forked.start(self.path, arguments, limit=1 << 20)
        self._started.append(process)
        assert await process.stdout.readline() == b"%d\n" % process.pid
        return process

    def pid(self) -> int:
        """Of the server, which is the parent of all."""
        return parent_of(self._started[-1].pid)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def serving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs a test with a fork server for the module above, or another; ``more`` is run when it is imported."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])))
    monkeypatch.setenv("CRAD_FORK_SERVER", "")
    monkeypatch.chdir(tmp_path)
    notes: list[str] = []

    @asynccontextmanager
    async def server() -> AsyncIterator[Server]:
        async with fork_server(tmp_path, notes.append, "become") as entries:
            assert not notes
            yield Server(Path(entries[forking.NAME]))

    def run(test: Callable[[Server], Coroutine[Any, Any, None]], more: str = "", module: str = MODULE) -> None:
        (tmp_path / "become.py").write_text(module.replace("MORE", more))

        async def go() -> None:
            async with server() as there:
                await test(there)

        asyncio.run(asyncio.wait_for(go(), 60))

    return run


def test_a_forked_process_is_what_executing_gives(
    serving: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    async def test(server: Server) -> None:
        monkeypatch.setenv("CRAD_THIS", "of one process \udcff")
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        monkeypatch.chdir(elsewhere)
        words = ["look", "a b", "\udcff"]
        command = [sys.executable, "-P", "-m", "become", *words]
        environment = dict(os.environ)  # without what libraries have put into that of pytest behind Python's back
        executed = subprocess.run(command, input=b"read\n", stdout=subprocess.PIPE, check=True, env=environment)
        forked = await server.start(*words)
        forked.stdin.write(b"read\n")
        forked.stdin.close()
        found, expected = json.loads(await forked.stdout.read()), json.loads(executed.stdout.splitlines()[1])
        assert await forked.wait() == 0
        assert found == expected
        assert (found["said"], found["cmdline"][4:]) == ("read\n", words)

    serving(test)
    assert capfd.readouterr().err == "complained\n" * 2  # both have the standard error of who asked


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["exit", "null"], 0, ""),
        (["exit", "7"], 7, ""),
        (["exit", '"no more images"'], 1, "no more images\n"),
        (["raise"], 1, "RuntimeError: wrong\n"),
        (["signal", str(int(signal.SIGKILL))], -signal.SIGKILL, ""),
        (["signal", str(int(signal.SIGTERM))], -signal.SIGTERM, ""),
    ],
)
def test_its_end_is_told(
    serving: Callable[..., None], capfd: pytest.CaptureFixture[str], arguments: list[str], status: int, words: str
) -> None:
    async def test(server: Server) -> None:
        process = await server.start(*arguments)
        assert await process.stdout.read() == b""
        assert await process.wait() == await process.wait() == status

    serving(test)
    assert capfd.readouterr().err.endswith(words)


def test_one_that_is_stopped_can_be_killed_and_ends_with_who_asked_for_it(serving: Callable[..., None]) -> None:
    async def test(server: Server) -> None:
        killed, left = [await server.start("wait") for _ in range(2)]
        for each in (killed, left):
            os.kill(each.pid, signal.SIGSTOP)
        killed.kill()
        assert await killed.wait() == -signal.SIGKILL
        left._connection.close()  # as the system does when a process has been killed
        assert await left.stdout.read() == b""
        until(lambda: not runs(left.pid), "it ends", 10)
        assert (await (await server.start("exit", "3")).wait()) == 3  # and the server goes on

    serving(test)


def test_it_knows_for_whom_it_works(serving: Callable[..., None]) -> None:
    async def test(server: Server) -> None:
        process = await server.start("employer")
        assert await process.stdout.readline() == b"%d\n" % os.getpid()

    serving(test)


def test_none_outlives_a_fork_server_that_is_killed(serving: Callable[..., None]) -> None:
    async def test(server: Server) -> None:
        waits, stopped = [await server.start("wait") for _ in range(2)]
        os.kill(stopped.pid, signal.SIGSTOP)
        os.kill(server.pid(), signal.SIGKILL)
        for each in (waits, stopped):
            assert await each.stdout.read() == b""
            assert await each.wait() == -signal.SIGKILL
            until(lambda each=each: not runs(each.pid), "it ends", 10)
        with pytest.raises(ConnectionRefusedError):
            await server.start("wait")

    serving(test)


def test_told_to_end_it_forks_no_more_and_waits_for_those_that_run(serving: Callable[..., None]) -> None:
    async def test(server: Server) -> None:
        process = await server.start("look")
        pid = server.pid()
        early = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with forking.short_address(server.path) as address:
            early.connect(address)
        await (await server.start("exit", "0")).wait()  # so it has accepted that one, too
        os.kill(pid, signal.SIGTERM)
        while True:  # until it has taken that in
            try:
                (await server.start("exit", "0")).kill()
            except OSError:
                break
        with early:
            early.send(forking.wish(["exit", "0"]))
            assert json.loads(early.recv(1000)) == {"refused": "the fork server is about to end"}
        process.stdin.close()
        assert json.loads(await process.stdout.read())["said"] == ""
        assert await process.wait() == 0
        until(lambda: not runs(pid), "the server ends", 10)

    serving(test)


#: Has a fork server and a process of it, and waits to be killed.
PARENT = """
import asyncio
from pathlib import Path
from launch.forking import fork_server
from peer.forked import Forked

async def main():
    async with fork_server(Path.cwd(), print, "become") as entries:
        process = await Forked.start(Path(entries["CRAD_FORK_SERVER"]), ["wait"], limit=100)
        print(process.pid, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


def test_all_end_when_the_launcher_is_killed(serving: Callable[..., None]) -> None:
    async def test(_: Server) -> None:
        with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as launcher:
            assert launcher.stdout is not None
            pid = int(launcher.stdout.readline())
            server = parent_of(pid)
            launcher.kill()
        for each in (pid, server):
            until(lambda each=each: not runs(each), "it ends", 10)

    serving(test)


def test_it_is_asked_while_it_imports(serving: Callable[..., None], tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)

    async def test(server: Server) -> None:
        asking = asyncio.ensure_future(server.start("exit", "5"))
        for _ in range(3):
            await asyncio.sleep(0)  # so it has asked
        await asyncio.to_thread(gate.write_text, "go on")
        assert await (await asking).wait() == 5

    serving(test, more=f"Path({str(gate)!r}).read_text()")


@pytest.mark.parametrize("answers", [True, False])
def test_one_that_gives_up_waiting_gets_no_process_later(
    serving: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    gate, trace = tmp_path / "gate", tmp_path / "trace"
    os.mkfifo(gate)
    monkeypatch.setattr(peer.forked, "_PATIENCE", 60 if answers else 0.01)

    async def test(server: Server) -> None:
        asking = asyncio.ensure_future(server.start("exit", "0"))
        if not answers:
            with pytest.raises(TimeoutError, match="has not answered for"):
                await asking
        monkeypatch.setattr(peer.forked, "_PATIENCE", 60)
        await asyncio.to_thread(gate.write_text, "go on")
        await (await server.start("exit", "0")).wait()
        if answers:
            await (await asking).wait()

    forks = f"os.register_at_fork(after_in_child=lambda: open({str(trace)!r}, 'a').write('forked '))"
    serving(test, more=f"Path({str(gate)!r}).read_text()\n{forks}")
    assert trace.read_text().split() == ["forked"] * (3 if answers else 2)  # one of them to end threads


def asked(path: Path, packet: bytes, files: int = 0) -> dict[str, Any]:
    """What it answers to a packet, with so many file descriptors."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        with forking.short_address(path) as address:
            connection.connect(address)
        socket.send_fds(connection, [packet], [connection.fileno()] * files)
        answer: dict[str, Any] = json.loads(connection.recv(forking.PACKET))
        return answer


def test_what_it_cannot_give_is_refused(serving: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(server: Server) -> None:
        await (await server.start("exit", "0")).wait()
        changed.setenv("OMP_NUM_THREADS", "3")  # read when a library was loaded
        changed.delenv("PYTHONPATH")
        with pytest.raises(OSError, match=r"the environment differs in OMP_NUM_THREADS, PYTHONPATH$"):
            await server.start("wait")
        changed.undo()
        with pytest.raises(OSError, match="the command line is too long"):
            await server.start("wait", "x" * 20_000)
        with pytest.raises(OSError, match="Message too long"):
            await server.start("wait", "x" * 1_000_000)
        assert "recursion" in asked(server.path, b"[" * 100_000)["refused"]
        wrong = json.dumps({"arguments": [], "environment": {**os.environ, "CRAD_X": 1}}).encode()
        assert asked(server.path, wrong, 4) == {"refused": "a value of the environment is no text"}
        await (await server.start("exit", "0")).wait()  # it is still there

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with monkeypatch.context() as changed:
        serving(test)


def test_nothing_is_forked_beside_threads(serving: Callable[..., None], tmp_path: Path) -> None:
    async def test(server: Server) -> None:
        with pytest.raises(OSError, match=r"the fork server has ended|reset|refused"):
            await server.start("wait")

    serving(test, more="import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()")
    assert (tmp_path / "fork-server.log").read_text() == "importing become has begun threads; it cannot be forked\n"


def test_the_learner_and_its_libraries_begin_no_threads_and_open_no_files() -> None:
    """And what they import later is imported before the fork."""
    code = (
        "import os, sys, importlib, crad_p2p.learner, launch.cli, crad_p2p.simulation\n"
        "for name in crad_p2p.learner.LATER: importlib.import_module(name)\n"
        "if not (pid := os.fork()): os._exit(0)\n"
        "os.waitpid(pid, 0)\n"
        "print(len(os.listdir('/proc/self/task')), [n for n in os.listdir('/proc/self/fd')[:-1] if int(n) > 2])\n"
        "before = set(sys.modules)\n"
        "sys.argv = 'crad-mesh simulate --count 2 --rounds 1 --samples 60 --pool cnn6@0.125 --threads 1'.split()\n"
        "try: launch.cli.main()\n"
        "finally: print(sorted(n for n in set(sys.modules) - before if n.startswith(('numpy', 'torch'))))\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert (ended.stdout.splitlines()[0], ended.stdout.splitlines()[-1]) == ("1 []", "[]")


COMPUTES = """
import os, torch

def main():
    print(os.getpid(), flush=True)
    before = len(os.listdir("/proc/self/task"))
    print(torch.get_num_threads())
    torch.set_num_threads(3)
    values = torch.randn(300, 300, generator=torch.Generator().manual_seed(1), requires_grad=True)
    images = torch.randn(8, 3, 64, 64, generator=torch.Generator().manual_seed(2))
    filters = values[:4, :27].reshape(4, 3, 3, 3)
    sum = torch.nn.functional.conv2d(images, filters).square().sum() + (values @ values).sum()
    sum.backward()
    print(sum.item().hex(), values.grad.sum().item().hex(), len(os.listdir("/proc/self/task")) - before)

if __name__ == "__main__":
    main()
"""


def test_torch_computes_as_in_a_process_of_its_own(
    serving: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bits, by as many threads as it is told to."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")

    async def test(server: Server) -> None:
        executed = subprocess.run([sys.executable, "-P", "-m", "become"], stdout=subprocess.PIPE, check=True)
        processes = [await server.start() for _ in range(2)]
        for each in processes:
            assert await each.stdout.read() == executed.stdout.partition(b"\n")[2]
        assert executed.stdout.split()[1] == b"2"
        assert int(executed.stdout.split()[-1]) >= 2  # more than before

    serving(test, module=COMPUTES)


# --- the socket -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_umask")
def test_the_socket_is_for_this_user_alone_and_its_path_may_be_long(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    path = folder / "socket"
    for _ in range(2):  # one that was left behind is replaced
        with forking.listen(path):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_without_a_socket_nothing_is_forked_and_it_is_said(tmp_path: Path) -> None:
    notes: list[str] = []

    async def run() -> dict[str, str]:
        async with fork_server(tmp_path, notes.append) as entries:
            return entries

    (tmp_path / "fork-server.sock").mkdir()
    assert asyncio.run(run()) == {}
    assert len(notes) == 1
    assert notes[0].startswith(f"{tmp_path / 'fork-server.sock'}: ")


def test_elsewhere_nothing_is_forked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> dict[str, str]:
        async with fork_server(tmp_path, pytest.fail) as entries:
            return entries

    monkeypatch.setattr(forking, "is_supported", lambda: False)
    assert asyncio.run(run()) == {}
    assert list(tmp_path.iterdir()) == []


# --- the learner ------------------------------------------------------------------------------------------------------


def test_where_none_can_be_forked_the_learner_is_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(forking.NAME, str(tmp_path / "nothing"))
    caplog.set_level(logging.INFO)

    async def run() -> int:
        learner = await LearnerProcess.start(["--help"])
        with contextlib.suppress(ValueError):
            async for _ in learner.events():
                pass
        return await learner.wait()

    assert asyncio.run(run()) == 0
    assert caplog.messages == [
        "the learner is not forked ([Errno 2] No such file or directory); it is started like any other process"
    ]
