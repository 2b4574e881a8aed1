"""Files that are replaced in one step, and keys that nobody else can read and nothing replaces."""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
import threading
from pathlib import Path

import pytest

from crad_p2p.durable import rename, write_file


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def full(_fd: int) -> None:
    raise OSError(28, "No space left on device")


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_file(path, "old")
    with path.open() as reader:
        write_file(path, "new …")
        assert reader.read() == "old"  # an open reader keeps what it had
    assert path.read_bytes() == "new …".encode()
    assert list(tmp_path.iterdir()) == [path]


def test_the_bytes_are_durable_before_the_name_and_the_name_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    done: list[tuple[str, bool]] = []
    monkeypatch.setattr(os, "fsync", lambda fd: done.append((Path(f"/dev/fd/{fd}").resolve().name, path.exists())))
    write_file(path, b"new")
    assert done == [("file.partial", False), (tmp_path.name, True)]
    done.clear()
    path.unlink()
    write_file(path, b"new", may_replace=False)
    assert [(name.partition(".")[0], is_there) for name, is_there in done] == [("file", False), (tmp_path.name, True)]
    done.clear()
    rename(path, tmp_path / "other")
    assert done == [(tmp_path.name, False)]


@pytest.mark.parametrize("may_replace", [True, False])
def test_a_disk_that_fails_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, may_replace: bool
) -> None:
    path = tmp_path / "file"
    if may_replace:
        write_file(path, "old")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            write_file(path, "new", may_replace=may_replace)
    assert path.exists() is may_replace
    assert not may_replace or path.read_text() == "old"
    write_file(path, "new", may_replace=may_replace)  # over what is left of the first try
    assert path.read_text() == "new"


@pytest.mark.usefixtures("no_umask")
@pytest.mark.parametrize("may_replace", [True, False])
def test_a_key_is_never_open_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, may_replace: bool) -> None:
    path = tmp_path / "peer.key"
    partial = path.with_name("peer.key.partial")
    partial.write_text("of a process that was killed")
    partial.chmod(0o666)
    with partial.open() as reader:
        seen = []
        fsync = os.fsync

        def watching(fd: int) -> None:
            seen.append(stat.S_IMODE(os.fstat(fd).st_mode))
            fsync(fd)

        monkeypatch.setattr(os, "fsync", watching)
        write_file(path, b"secret", 0o600, may_replace=may_replace)
        assert reader.read() == "of a process that was killed"  # not what came into the file of that name
    assert seen[0] == 0o600
    assert mode(path) == 0o600
    assert path.read_bytes() == b"secret"
    assert list(tmp_path.iterdir()) == [path]


def no_links(*_: object) -> None:
    raise PermissionError(1, "Operation not permitted")


@pytest.mark.parametrize("has_links", [True, False])
def test_what_must_not_be_replaced_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool) -> None:
    if not has_links:
        monkeypatch.setattr(os, "link", no_links)
    path = tmp_path / "peer.key"
    write_file(path, "first", 0o600, may_replace=False)
    with pytest.raises(FileExistsError) as raised:
        write_file(path, "second", 0o600, may_replace=False)
    assert raised.value.filename == str(path)
    assert path.read_text() == "first"
    assert mode(path) == 0o600
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("may_replace", [True, False])
def test_what_somebody_puts_in_the_way_is_not_written_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, may_replace: bool
) -> None:
    """At the last moment, as nothing else is there for long."""
    path, target = tmp_path / "peer.key", tmp_path / "target"
    target.write_text("as it was")
    monkeypatch.setattr(secrets, "token_hex", lambda _: "00000000")
    opened = os.open

    def late(name: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_CREAT:
            name.symlink_to(target)
        return opened(name, flags, mode)

    monkeypatch.setattr(os, "open", late)
    with pytest.raises(FileExistsError):
        write_file(path, "secret", 0o600, may_replace=may_replace)
    assert target.read_text() == "as it was"
    assert not path.exists()


def test_of_two_that_make_a_key_at_once_the_first_wins_and_each_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second has begun when the first is done."""
    path, fsync = tmp_path / "peer.key", os.fsync
    has_begun, is_done = threading.Event(), threading.Event()

    def slowly(fd: int) -> None:
        if threading.current_thread() is second:
            has_begun.set()
            assert is_done.wait(20)
        elif not has_begun.is_set():
            second.start()
            assert has_begun.wait(20)
        fsync(fd)

    def write_second() -> None:
        try:
            write_file(path, "of the second", 0o600, may_replace=False)
        except FileExistsError as error:
            refused.append(error)

    refused: list[FileExistsError] = []
    second = threading.Thread(target=write_second)
    monkeypatch.setattr(os, "fsync", slowly)
    write_file(path, "of the first", 0o600, may_replace=False)
    is_done.set()
    second.join(20)
    assert len(refused) == 1
    assert path.read_text() == "of the first"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("is_locked", [True, False])
def test_what_killed_processes_have_left_is_removed_and_nothing_else(tmp_path: Path, is_locked: bool) -> None:
    path = tmp_path / "peer.key"
    left = tmp_path / "peer.key.4711-0123abcd.partial"
    others = {tmp_path / name for name in ("peer.key.old.partial", "next-peer.key.partial", "peer.key.partial.old")}
    for each in (left, *others):
        each.write_text("half")
    with left.open("r+") as file:
        if is_locked:  # it is being written
            fcntl.flock(file, fcntl.LOCK_EX)
        write_file(path, "secret", 0o600, may_replace=False)
    assert {*tmp_path.iterdir()} == {path, *others} | ({left} if is_locked else set())


def test_one_that_is_taken_for_left_behind_before_it_is_locked_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, flock = tmp_path / "peer.key", fcntl.flock
    removed: list[Path] = []

    def late(fd: int, how: int) -> None:
        if not removed:
            removed.extend(tmp_path.iterdir())
            removed[0].unlink()
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", late)
    write_file(path, "secret", 0o600, may_replace=False)
    assert removed
    assert path.read_text() == "secret"
    assert list(tmp_path.iterdir()) == [path]


def test_a_key_that_another_process_has_put_there_meanwhile_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "peer.key"
    monkeypatch.setattr(os, "fsync", lambda _fd: path.write_text("of the other"))
    with pytest.raises(FileExistsError):
        write_file(path, "second", 0o600, may_replace=False)
    assert path.read_text() == "of the other"
