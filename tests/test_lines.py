"""Lines on terminals of any width, and the texts of help on one of 80 columns."""

from __future__ import annotations

import inspect
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from crad_p2p.errors import UsageError
from crad_p2p.lines import fold, width_of
from launch import cli
from launch.audit import _say
from peer.cli import app as peer_app

FINGERPRINT = ":".join(f"{number:02X}" for number in range(32))
SENTENCE = "  Next: send crad-tls/0/peer.csr to whoever runs the CA, and read the fingerprint out by telephone; there"


def test_for_programs_a_line_is_whole() -> None:
    assert width_of(io.StringIO()) is None
    assert fold(SENTENCE, None) == SENTENCE
    assert fold(f"  fingerprint  {FINGERPRINT}", None) == f"  fingerprint  {FINGERPRINT}"


@pytest.mark.parametrize("width", [40, 80, 100])
def test_on_a_terminal_it_is_broken_between_words_and_stays_indented(width: int) -> None:
    lines = fold(SENTENCE, width).split("\n")
    assert len(lines) > 1
    assert all(len(line) <= width and re.match(r"  \S", line) for line in lines)
    assert " ".join(map(str.strip, lines)) == SENTENCE.strip()


def test_a_fingerprint_is_halved_and_both_halves_are_below_one_another() -> None:
    first, second = fold(f"  key fingerprint  {FINGERPRINT}", 80).split("\n")
    assert first == f"  key fingerprint  {FINGERPRINT[:48]}"
    assert second == " " * 19 + FINGERPRINT[48:]
    assert fold(f"  {FINGERPRINT}", 97) == f"  {FINGERPRINT}"


def test_what_is_to_be_copied_stays_whole() -> None:
    command = "  crad-mesh certs install a-certificate-with-a-long-name.pem --ca ca.pem"
    assert fold(command, 40) == command


def test_an_audit_breaks_no_fingerprint_on_a_terminal() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
    _say(console, f"Trusted CA, sha256 {FINGERPRINT}")
    assert (
        console.file.getvalue().splitlines()
        == [  # type: ignore[attr-defined]
            f"Trusted CA, sha256 {FINGERPRINT[:48]}",
            " " * 19 + FINGERPRINT[48:],
        ]
    )


def test_an_error_is_broken_between_words_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    from crad_p2p import commands

    def fails(**_: Any) -> None:
        raise UsageError(SENTENCE.strip())

    monkeypatch.setattr(commands, "width_of", lambda _: 60)
    with pytest.raises(SystemExit):
        commands.run_command(fails, "crad-mesh")  # type: ignore[arg-type]
    said = capsys.readouterr().err
    assert max(map(len, said.splitlines())) <= 60
    assert " ".join(said.split()) == f"crad-mesh: {SENTENCE.strip()}"


def commands_of(group: Any, name: str) -> Iterator[tuple[str, Any]]:
    for key, command in getattr(group, "commands", {}).items():
        yield from commands_of(command, f"{name} {key}")
    yield name, group


COMMANDS = [
    *commands_of(typer.main.get_command(cli.app), "crad-mesh"),
    ("crad-peer", typer.main.get_command(peer_app)),
]


@pytest.mark.parametrize(("name", "command"), COMMANDS, ids=[name for name, _ in COMMANDS])
def test_help_is_not_ragged_at_80_columns(name: str, command: Any) -> None:
    """Typer keeps the line breaks of every paragraph but the first, and breaks what is too long once more."""
    del name
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n")[1:]:
        lines = paragraph.split("\n")
        assert len(lines) == 1 or max(map(len, lines)) <= 78, paragraph


def test_a_new_federation_file_leads_to_certificates_and_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = CliRunner().invoke(cli.app, ["init", "mine.yaml", "--count", "2"]).output
    commands = re.findall(r"^ +(crad-.*)$", said, re.MULTILINE)
    assert commands == [
        "crad-mesh certs init-ca --federation NAME",
        "crad-mesh certs request --id 0 --peers mine.yaml",
        "crad-mesh check --id 0 --peers mine.yaml",
        "crad-peer --id 0 --peers mine.yaml",
    ]
    assert max(map(len, said.splitlines())) <= 80
