"""Files that are replaced in one step, and keys that nobody else can read and nothing replaces."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from crad_p2p.durable import rename, write_file


@pytest.fixture
def no_umask() -> Iterator[None]:
    """Nothing but the program itself keeps others from reading its files."""
    before = os.umask(0)
    yield
    os.umask(before)


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


def test_a_key_that_another_process_has_put_there_meanwhile_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "peer.key"
    monkeypatch.setattr(os, "fsync", lambda _fd: path.write_text("of the other"))
    with pytest.raises(FileExistsError):
        write_file(path, "second", 0o600, may_replace=False)
    assert path.read_text() == "of the other"
