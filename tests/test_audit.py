"""``crad-mesh audit`` on small state directories: what is whole is verified, and every kind of tampering is found."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from base64 import b64decode, b64encode
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from lineages import (
    PEERS,
    ROUNDS,
    Manifests,
    authority,
    consumed,
    content,
    credentials,
    federation,
    manifest,
    sha256,
    signed,
    whole_run,
    write_state,
)
from typer.testing import CliRunner

from crad_p2p.errors import AuditError, ConfigurationError, CradError, ExitCode, UsageError
from crad_p2p.manifest import MAX_BYTES, ClassStatistics, Manifest
from launch.authority import to_pem
from launch.cli import app
from peer.certificates import fingerprint

WHOLE = (
    "21 manifests are signed by their peers, 36 of 36 consumed snapshots are verified, and {files} snapshot files have "
    "the digests of their manifests. All is verified.\n"
)


@pytest.fixture(scope="module")
def manifests() -> Manifests:
    return {key: signed(each) for key, each in whole_run().items()}


@pytest.fixture(scope="module")
def ca(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ca") / "ca.pem"
    path.write_bytes(to_pem(authority().certificate))
    return path


@pytest.fixture
def state(tmp_path: Path, manifests: Manifests) -> Path:
    """Of peer 0."""
    return write_state(tmp_path / "state", 0, manifests)


def run_audit(*arguments: str | Path) -> tuple[str, CradError | None]:
    """What it prints, and the error that it ends with."""
    ended = CliRunner().invoke(app, ["audit", *map(str, arguments)])
    assert ended.exception is None or isinstance(ended.exception, CradError), ended.exception
    assert all(character == "\n" or character.isprintable() for character in ended.output), repr(ended.output)
    return ended.output, ended.exception


def findings(output: str) -> list[str]:
    return [line.removeprefix("finding: ") for line in output.splitlines() if line.startswith("finding: ")]


def found_in(state: Path, ca: Path) -> list[str]:
    """Findings of an audit that must have some, and end with 12."""
    output, error = run_audit(state, "--ca", ca)
    assert isinstance(error, AuditError)
    assert error.exit_code == ExitCode.AUDIT == 12
    assert str(error).startswith(f"{state}: {len(findings(output))} finding")
    return findings(output)


def rewrite(state: Path, line: int, document: bytes | None) -> None:
    """Put something else in place of a line of lineage.jsonl, from 1 on, or nothing."""
    path = state / "lineage.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    lines[line - 1 : line] = [] if document is None else [document + b"\n"]
    path.write_bytes(b"".join(lines))


def line_of(state: Path, peer: int, number: int) -> int:
    for at, line in enumerate((state / "lineage.jsonl").read_bytes().splitlines(), start=1):
        each = Manifest.from_bytes(line)
        if (each.peer, each.round) == (peer, number):
            return at
    raise AssertionError(f"no line of round {number} of peer {peer}")


def replace(state: Path, document: Manifest) -> str:
    """Put a manifest in place of that of its peer and round; where it stands."""
    at = line_of(state, document.peer, document.round)
    rewrite(state, at, document.to_bytes())
    return f"lineage.jsonl, line {at}"


# --- what is whole ----------------------------------------------------------------------------------------------------


def test_a_state_directory_is_verified(state: Path, ca: Path) -> None:
    output, error = run_audit(state, "--ca", ca)
    assert error is None
    assert output.endswith(WHOLE.format(files=6))
    assert re.search(rf"Trusted CA \S+CN=lineage, sha256 {fingerprint(authority().certificate)}\n", output)
    assert f"Federation lineage, run {federation().digest()}\n" in output
    rows = [line.split() for line in output.splitlines() if line.strip()[:1].isdigit()]
    assert rows[:3] == [[str(i), "0", "to", "6", "7", "7", "12", "of", "12", "-"] for i in PEERS]


def test_a_mesh_is_verified_as_one(tmp_path: Path, manifests: Manifests, ca: Path) -> None:
    for peer in PEERS:
        write_state(tmp_path / "peers" / str(peer), peer, manifests)
    assert isinstance(run_audit(tmp_path)[1], UsageError)  # no CA yet
    (tmp_path / "tls").mkdir()
    shutil.copy(ca, tmp_path / "tls/ca.pem")
    output, error = run_audit(tmp_path)
    assert error is None
    assert output.endswith(WHOLE.format(files=18))
    rewrite(tmp_path / "peers/1", 4, None)  # the others have it still
    assert run_audit(tmp_path)[1] is None
    assert isinstance(run_audit(tmp_path / "peers/1", "--ca", ca)[1], AuditError)


def test_lines_of_another_peer_beside_it_close_a_gap(
    state: Path, ca: Path, manifests: Manifests, tmp_path: Path
) -> None:
    rewrite(state, 7, None)
    assert len(found_in(state, ca)) == 1
    other = write_state(tmp_path / "other", 1, manifests)
    shutil.copy(other / "lineage.jsonl", state / "lineage-1.jsonl")
    assert run_audit(state, "--ca", ca)[1] is None


def test_old_certificates_and_duplicates_are_right(tmp_path: Path, manifests: Manifests, ca: Path) -> None:
    long_ago = credentials(1, now=datetime.now(UTC) - timedelta(days=1000))  # expired since
    state = write_state(tmp_path / "state", 0, {**manifests, (1, 2): signed(manifest(1, 2), long_ago)})
    path = state / "lineage.jsonl"
    path.write_bytes(path.read_bytes() * 2)
    assert run_audit(state, "--ca", ca)[0].endswith(WHOLE.format(files=6))


def test_signed_again_is_a_note(state: Path, ca: Path) -> None:
    again = signed(manifest(2, 1))
    with (state / "lineage.jsonl").open("ab") as file:
        file.write(again.to_bytes() + b"\n")
    output, error = run_audit(state, "--ca", ca)
    assert error is None
    assert "note: of 1 round there are several manifests with the same snapshot" in output


def test_the_lineage_of_one_model(state: Path, ca: Path, tmp_path: Path) -> None:
    (tmp_path / "model").write_bytes(content(1, 6))
    for model in (sha256(1, 6), str(tmp_path / "model")):
        output, error = run_audit(state, "--ca", ca, "--model", model)
        assert error is None
        assert (
            f"model {sha256(1, 6)[:12]}… (round 6 of peer 1) descends from 3 initial models; 19 manifests, all signed "
            f"by their peers; nothing is missing.\nManifests by round: round 6: 1, rounds 0 to 5: 3 each\n"
        ) in output
    rewrite(state, line_of(state, 2, 0), None)
    output, error = run_audit(state, "--ca", ca, "--model", sha256(1, 6))
    assert "descends from 2 initial models; 18 manifests" in output
    assert "1 finding; the lineage of the model is not all verified" in str(error)
    _, error = run_audit(state, "--ca", ca, "--model", "0" * 64)
    assert isinstance(error, AuditError)
    assert str(error).count("0" * 64) == 1
    assert f"no rightly signed manifest is of --model {'0' * 64}; see above" in str(error)
    assert isinstance(run_audit(state, "--ca", ca, "--model", "\x1b[2Jnone")[1], UsageError)


# --- what is tampered with --------------------------------------------------------------------------------------------


def test_a_changed_count(state: Path, ca: Path, manifests: Manifests) -> None:
    statistics = ClassStatistics(counts=(4, 9), hits=(1, 2), predicted=(3, 4))
    place = replace(state, manifests[1, 3].model_copy(update={"statistics": statistics}))
    (finding,) = found_in(state, ca)
    assert finding.startswith(f"{place}: signature of the manifest of round 3 of peer 1: does not fit the signature")


def test_a_count_that_its_peer_has_changed(state: Path, ca: Path) -> None:
    replace(state, signed(manifest(1, 3, statistics=ClassStatistics(counts=(4, 9), hits=(1, 2), predicted=(3, 4)))))
    (finding,) = found_in(state, ca)
    assert finding.startswith("peer 1 counts other validation images in round 3 than in round 0")


def test_a_swapped_digest(state: Path, ca: Path, manifests: Manifests) -> None:
    swapped = (consumed(0, 2), consumed(2, 1).model_copy(update={"round": 2}))
    place = replace(state, manifests[1, 3].model_copy(update={"consumed": swapped}))
    assert found_in(state, ca)[0].startswith(f"{place}: signature of the manifest of round 3 of peer 1: does not fit")
    replace(state, signed(manifest(1, 3, consumed=swapped)))  # by the peer itself
    (finding,) = found_in(state, ca)
    assert finding.startswith(f"round 2 of peer 2 has snapshot {sha256(2, 2)[:12]}… by its own manifest, and ")


@pytest.mark.parametrize("peer", PEERS)
def test_a_deleted_manifest(state: Path, ca: Path, peer: int) -> None:
    rewrite(state, line_of(state, peer, 2), None)
    (finding,) = found_in(state, ca)
    assert finding.startswith(f"round 2 of peer {peer}: its manifest is not here, though round 3 of peer ")


def test_signed_by_another_peer_another_ca_or_nobody(state: Path, ca: Path) -> None:
    place = replace(state, signed(manifest(1, 3), credentials(2)))
    assert found_in(state, ca) == [f"{place}: manifest of peer 1 is signed by peer 2"]
    place = replace(state, signed(manifest(1, 3), credentials(1, number=1)))
    [finding] = found_in(state, ca)
    assert re.fullmatch(
        r"1 manifest of peer 1 \(round 3\) is signed under the CA serialNumber=[0-9a-f]{8},CN=lineage, which is not "
        rf"among those of --ca; was the CA replaced\? Then give both, in one file; the first is {place}",
        finding,
    )
    place = replace(state, signed(manifest(1, 3), credentials(1, "another")))
    assert len(found_in(state, ca)) == 1
    place = replace(state, manifest(1, 3))
    assert found_in(state, ca) == [
        f"1 manifest of peer 1 (round 3) is not signed, as those of a run with --insecure; the first is {place}"
    ]


def test_the_ca_was_replaced(state: Path, tmp_path: Path, ca: Path) -> None:
    """What is signed under the old one is one finding, and none with both."""
    new = tmp_path / "new.pem"
    new.write_bytes(to_pem(authority(number=1).certificate))
    [finding] = found_in(state, new)
    assert finding.startswith("21 manifests of peers 0, 1, 2 (rounds 0 to 6) are signed under the CA ")
    both = tmp_path / "both.pem"
    both.write_bytes(new.read_bytes() + ca.read_bytes())
    assert run_audit(state, "--ca", both)[1] is None


def test_a_changed_byte_of_a_certificate_is_no_other_ca(state: Path, ca: Path, manifests: Manifests) -> None:
    signature = manifests[1, 3].signature
    assert signature is not None
    der = bytearray(b64decode(signature.certificate))
    der[-1] ^= 1  # in the CA's signature
    spoilt = signature.model_copy(update={"certificate": b64encode(der).decode()})
    place = replace(state, manifests[1, 3].model_copy(update={"signature": spoilt}))
    [finding] = found_in(state, ca)
    assert finding.startswith(f"{place}: signature of the manifest of round 3 of peer 1: names the CA ")
    assert "which is trusted here, and does not have its signature: it is damaged or forged" in finding


def test_nothing_is_signed(tmp_path: Path, ca: Path) -> None:
    state = write_state(tmp_path / "state", 0, whole_run())
    assert [each[:38] for each in found_in(state, ca)] == [f"7 manifests of peer {i} (rounds 0 to 6) " for i in PEERS]


def test_of_another_run(state: Path, ca: Path) -> None:
    other = federation(seed=7).digest()
    place = replace(state, signed(manifest(1, 3, run=other)))
    (finding,) = found_in(state, ca)
    assert finding.startswith(f"{place}: is of another run ({other[:12]}…, expected {federation().digest()[:12]}…)")


def test_the_fields_of_the_run_are_changed(state: Path, ca: Path) -> None:
    path = state / "federation.json"
    path.write_text(path.read_text().replace('"rounds": 6', '"rounds": 7'))
    output, error = run_audit(state, "--ca", ca)
    assert isinstance(error, AuditError)
    assert len(findings(output)) == 20
    assert "… and 1 more findings" in output


def test_a_manifest_in_the_wrong_place(state: Path, ca: Path) -> None:
    shutil.copy(state / "received/000006/1.json", state / "received/000006/2.json")
    first, *_ = found_in(state, ca)
    assert first == "received/000006/2.json: holds round 6 of peer 1; expected round 6 of peer 2"


@pytest.mark.parametrize("name", ["rounds/000005/snapshot.safetensors", "received/000006/2.safetensors"])
@pytest.mark.parametrize("change", [lambda old: old[:-1] + b"?", lambda old: old + b"?"])
def test_a_changed_snapshot(state: Path, ca: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    (state / name).write_bytes(change((state / name).read_bytes()))
    (finding,) = found_in(state, ca)
    assert finding.startswith(f"{name}: has ")


def test_two_faces_and_the_evidence_of_them(state: Path, ca: Path) -> None:
    other = signed(manifest(2, 4, sha256="e" * 64))
    (state / "conflicts").mkdir()
    evidence = {"peer": 2, "round": 4, "manifests": {"peer 2, round 4": other.to_bytes().decode()}}
    (state / "conflicts/peer-2-round-4.json").write_text(json.dumps(evidence))
    first, second = found_in(state, ca)
    assert first.startswith("conflicts/peer-2-round-4.json: is evidence of two different snapshots")
    assert second.startswith("peer 2 has signed 2 different snapshots for round 4: ")
    (state / "conflicts/peer-2-round-4.json").write_text("[" * 100_000)
    assert found_in(state, ca)[1].endswith("is damaged; expected a conflict with its manifests")


def test_what_was_set_aside_or_refused_is_looked_at(state: Path, ca: Path) -> None:
    for place, number in (("set-aside/000004-17/manifest.json", 4), ("quarantine/1.json", 5)):
        (state / place).parent.mkdir(parents=True)
        (state / place).write_bytes(manifest(0 if number == 4 else 1, number).to_bytes())
    assert len(found_in(state, ca)) == 2


# --- what is damaged, or meant to do harm -----------------------------------------------------------------------------


def test_a_torn_line_in_the_middle_and_at_the_end(state: Path, ca: Path, manifests: Manifests) -> None:
    path = state / "lineage.jsonl"
    whole = path.read_bytes()
    at = line_of(state, 1, 2)
    rewrite(state, at, manifests[1, 2].to_bytes()[:100])
    torn, missing = found_in(state, ca)
    assert torn.startswith(f"lineage.jsonl, line {at}: is damaged (manifest is not valid JSON: ")
    assert missing.startswith("round 2 of peer 1: its manifest is not here")
    path.write_bytes(whole + manifests[0, 5].to_bytes()[:100])  # which is still in its own place
    output, error = run_audit(state, "--ca", ca)
    assert error is None
    assert "note: lineage.jsonl, line 16: ends without a line break, as a killed process leaves it" in output
    path.write_bytes(whole[:-100])  # and here something is gone
    assert found_in(state, ca)[0].startswith("round 4 of peer 2: its manifest is not here")


@pytest.mark.parametrize(
    "line",
    [
        b"\x00" * 50,
        b"\xff\xfe",
        b"",
        b"[" * 100_000,
        b"{" * (MAX_BYTES + 1),
        b"x" * (3 * MAX_BYTES),
        b'{"\x1b[2J": 1}',
        b'{"run": "\\u001b[31m[red]"}',
        b"9" * 10_000,
    ],
    ids=["zeros", "no UTF-8", "empty", "deep", "too long", "far too long", "escape", "markup", "digits"],
)
def test_hostile_lines_are_named(state: Path, ca: Path, line: bytes) -> None:
    with (state / "lineage.jsonl").open("ab") as file:
        file.write(line + b"\n")
    (finding,) = found_in(state, ca)
    assert finding.startswith("lineage.jsonl, line 16: is damaged (")


def test_hostile_names_and_kinds_of_files(state: Path, ca: Path) -> None:
    (state / "conflicts").mkdir()
    (state / "conflicts/\x1b[2J[bold].json").write_text("{}")
    os.mkfifo(state / "received/000006/9.json")
    (state / "received/000006/10.json").mkdir()
    (state / "lineage-2.jsonl").symlink_to("/dev/zero")
    (state / "received/99999999999999999999").mkdir()
    (state / "history.jsonl").write_bytes((state / "history.jsonl").read_bytes() + b"[" * 100_000 + b"\n\xff\n{}\n")
    said = found_in(state, ca)
    assert any("conflicts/\\x1b[2J[bold].json" in each for each in said)
    assert any(each.startswith("received/000006/9.json: cannot be read (is not a plain file)") for each in said)


def test_a_history_that_says_more_than_the_manifests(state: Path, ca: Path) -> None:
    for folder in ("rounds", "received"):
        shutil.rmtree(state / folder)
    said = found_in(state, ca)  # cut off after round 4
    assert said[0] == "round 5 of peer 0: its manifest is not here, though it must have been"


# --- what a user may get wrong ----------------------------------------------------------------------------------------


def test_errors_of_the_command_line(tmp_path: Path, state: Path, ca: Path) -> None:
    for arguments, kind, sentence in (
        ([tmp_path], UsageError, "no federation.json is there"),
        ([tmp_path / "none"], UsageError, "no federation.json is there"),
        ([state], UsageError, "which CA is trusted must be given with --ca FILE"),
        ([state, "--ca", tmp_path / "none"], CradError, "is not there"),
        ([state, "--ca", state / "federation.json"], CradError, "no PEM block"),
    ):
        output, error = run_audit(*arguments)
        assert isinstance(error, kind)
        assert sentence in str(error)
        assert output == ""
    (state / "federation.json").write_text("{}")
    assert isinstance(run_audit(state, "--ca", ca)[1], ConfigurationError)


def test_an_empty_state_directory_proves_nothing(tmp_path: Path, ca: Path) -> None:
    (tmp_path / "federation.json").write_text(json.dumps({"peer": 0, "agreed": federation().agreed()}))
    _, error = run_audit(tmp_path, "--ca", ca)
    assert "no manifest of the federation is there" in str(error)


def test_for_programs_nothing_is_folded(state: Path, ca: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = run_audit(state, "--ca", ca)
    assert (
        "consumed: snapshots named as teachers whose own manifest names the same sha256, of all that are named\n"
        in whole
    )
    monkeypatch.setenv("COLUMNS", "40")
    assert run_audit(state, "--ca", ca)[0] == whole


def test_it_loads_no_torch_and_ends_with_12(state: Path, ca: Path) -> None:
    rewrite(state, 3, None)
    code = f"""
import sys
from launch.cli import main
sys.argv = ["crad-mesh", "audit", {str(state)!r}, "--ca", {str(ca)!r}]
try:
    main()
finally:
    assert not {{"torch", "torchvision", "numpy", "sklearn"}} & set(sys.modules)
"""
    ended = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.returncode == ExitCode.AUDIT, ended.stderr
    assert ended.stderr == (
        f"crad-mesh: {state}: 1 finding; see above, and ask the sites concerned, or restore the files from a copy\n"
    )
    assert ROUNDS == 6


def test_no_console_makes_pictures_of_fingerprints() -> None:
    """Rich would print ``41:CD:A0`` with a disc in its middle."""
    for path in (Path(__file__).parents[1] / "launch").rglob("*.py"):
        assert "Console()" not in path.read_text(encoding="utf-8"), path
