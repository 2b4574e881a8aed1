"""The clock on the wall decides nothing: a host whose clock is wrong prints other times, and that is all."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from processes import Peer, federation_file, free_port

from crad_p2p.errors import ExitCode
from peer.link import _clock_text

ROOT = Path(__file__).parents[1]
#: Put before the C library of every process of the peer: the time of day is ten minutes late.
LATE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>
int clock_gettime(clockid_t id, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *)) dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(id, now);
    if (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE) now->tv_sec -= 600;
    return result;
}
int gettimeofday(struct timeval *now, void *zone) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *now) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    if (now) *now = precise.tv_sec;
    return precise.tv_sec;
}
"""


@pytest.fixture
def late(tmp_path: Path) -> str:
    """Path of the library."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs a C compiler, and Linux's way to put a library before others")
    source, library = tmp_path / "late.c", tmp_path / "late.so"
    source.write_text(LATE)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    return str(library)


def test_two_peers_whose_clocks_differ_by_ten_minutes(tmp_path: Path, start: Callable[..., Peer], late: str) -> None:
    entries = [{"id": i, "address": f"127.0.0.1:{free_port()}", "arch": "cnn6@0.125"} for i in (0, 1)]
    path = federation_file(tmp_path, peers=entries, rounds=3)
    options = ["--peers", str(path), "--linger", "60"]
    peers = [
        start("--id", "0", *options, state=tmp_path / "0"),
        start("--id", "1", *options, state=tmp_path / "1", LD_PRELOAD=late),
    ]
    assert [peer.ended() for peer in peers] == [ExitCode.COMPLETE] * 2, "".join(peer.output for peer in peers)
    times = [datetime.fromisoformat(" ".join(peer.output.split()[:2])) for peer in peers]
    assert timedelta(minutes=9) < times[0] - times[1] < timedelta(minutes=11)  # so the clocks did differ
    assert re.search(
        r"peer 1 at .*: connected; its clock is 10 min behind the one here, which does no harm\n", peers[0].output
    )
    assert re.search(
        r"peer 0 at .*: connected; its clock is 10 min ahead of the one here, which does no harm\n", peers[1].output
    )
    assert all([record.teachers for record in peer.history()] == [(1 - i,)] * 3 for i, peer in enumerate(peers))


@pytest.mark.parametrize(
    ("ahead", "took", "said"),
    [
        (6.0, 0.1, "6 s ahead of"),
        (-5.1, 0.1, "5 s behind"),
        (5.0, 0.1, ""),
        (-4.0, 0.1, ""),
        (6.0, 4.0, ""),
        (9.0, 6.0, ""),
    ],
)
def test_only_what_surely_differs_is_said(ahead: float, took: float, said: str) -> None:
    found = _clock_text(ahead, took)
    assert said in found
    assert bool(found) == bool(said)


@pytest.mark.parametrize("package", ["crad_p2p", "peer", "launch"])
def test_no_module_asks_for_the_time_of_day(package: str) -> None:
    """``time.monotonic`` alone is used; the log's times are made by the logging library.

    But for the dates of certificates, and for people: the recorder writes it down once a start, to compare a recording
    with a log, and a peer tells it in its greeting, and says if that of another one differs.
    """
    asked = []
    for path in sorted((ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
            if name in ("time.time", "datetime.now", "datetime.utcnow", "datetime.datetime.now", "date.today"):
                asked.append(f"{path.relative_to(ROOT)}: {name}")
    of_certificates = [
        f"peer/{name}.py: datetime.now"
        for name in ("certificates", "credentials", "link", "signatures", "strangers", "tls")
    ]
    allowed = {*of_certificates, "peer/link.py: time.time", "peer/recorder.py: time.time", "peer/server.py: time.time"}
    allowed |= {f"launch/{name}.py: datetime.now" for name in ("authority", "certs", "inspection")}
    allowed |= {"launch/preflight/greet.py: time.time"}
    assert set(asked) <= allowed
