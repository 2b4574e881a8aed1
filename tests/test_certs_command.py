"""``crad-mesh certs``, from the CA to a peer's directory."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import typer
import yaml
from typer.testing import CliRunner, Result

import crad_p2p.durable
from crad_p2p.durable import write_file
from crad_p2p.errors import CertificateError, CradError, ExitCode
from launch.authority import (
    key_to_pem,
    load_authority,
    load_request,
    make_request,
    new_authority,
    new_key,
    sign_request,
    to_pem,
)
from launch.cli import app
from peer.credentials import Credentials, load_authorities, load_credentials

Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Run a command in the test's folder, where nothing but the program keeps others from reading files."""
    monkeypatch.chdir(tmp_path)
    before = os.umask(0)

    def command(words: str, error: type[CradError] | None = None) -> Result:
        result = CliRunner().invoke(app, ["certs", *words.split()])
        if error is None:
            assert result.exit_code == 0, (result.output, result.exception)
        else:
            assert isinstance(result.exception, error), (result.output, result.exception)
            assert "\n" not in str(result.exception)
        return result

    yield command
    os.umask(before)


def refused(run: Run, words: str, *said: str, code: ExitCode = ExitCode.CERTIFICATE) -> str:
    """The command ends with this code and one sentence that has these words."""
    text = str(run(words, CradError).exception)
    for word in said:
        assert word in text, text
    error = run(words, CradError).exception
    assert isinstance(error, CradError)
    assert error.exit_code == code
    return text


def mode(path: str) -> int:
    return stat.S_IMODE(Path(path).stat().st_mode)


def enrol(run: Run, peer: int = 0) -> Credentials:
    """From nothing, or from a CA, to a peer's directory."""
    if not Path("crad-ca").exists():
        run("init-ca --federation colon")
    run(f"request --id {peer} --federation colon")
    run(f"sign crad-tls/{peer}/peer.csr --id {peer}")
    run(f"install peer-{peer}.pem --ca crad-ca/ca.pem")
    return load_credentials(Path(f"crad-tls/{peer}"), "colon", peer)


def files(folder: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


# --- from end to end --------------------------------------------------------------------------------------------------


def test_from_a_ca_to_a_peers_directory(run: Run) -> None:
    made = run("init-ca --federation colon").output
    assert set(files("crad-ca")) == {"ca.pem", "ca.key"}
    assert (mode("crad-ca"), mode("crad-ca/ca.key")) == (0o700, 0o600)
    assert "crad-ca/ca.key  stays here" in made
    assert "send crad-ca/ca.pem to every site" in made

    asked = run("request --id 0 --federation colon").output
    assert set(files("crad-tls/0")) == {"peer.key", "peer.csr"}
    assert (mode("crad-tls/0"), mode("crad-tls/0/peer.key")) == (0o700, 0o600)
    assert "request for peer 0 of federation colon" in asked
    assert "send crad-tls/0/peer.csr to whoever runs the CA" in asked
    assert "crad-tls/0/peer.key never leaves this machine" in asked

    signed = run("sign crad-tls/0/peer.csr --id 0").output
    assert "peer-0.pem: certificate of peer 0 of federation colon" in signed
    assert "(365 days left)" in signed
    assert "send peer-0.pem and crad-ca/ca.pem to the site of peer 0" in signed
    assert "crad-mesh certs install peer-0.pem --ca ca.pem\nor, if it has a ca.pem already, without" in signed
    assert fingerprint_in(asked, "key fingerprint") == fingerprint_in(signed, "key fingerprint")

    installed = run("install peer-0.pem --ca crad-ca/ca.pem").output
    assert set(files("crad-tls/0")) == {"peer.key", "peer.pem", "ca.pem"}
    assert fingerprint_in(made, "") == fingerprint_in(installed, "signed by the CA")
    assert load_credentials(Path("crad-tls/0"), "colon", 0).peer == 0


def fingerprint_in(text: str, after: str) -> str:
    found = re.search("(?:[0-9A-F]{2}:){31}[0-9A-F]{2}", text[text.index(after) :])
    assert found
    return found[0]


def test_what_was_signed_is_listed(run: Run) -> None:
    enrol(run, 0)
    first = Path("crad-ca/issued.jsonl").read_text()
    enrol(run, 1)
    text = Path("crad-ca/issued.jsonl").read_text()
    assert text.startswith(first)
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["id"] for line in lines] == [0, 1]
    certificate = load_credentials(Path("crad-tls/1"), "colon", 1).certificate
    assert lines[1]["serial"] == f"{certificate.serial_number:x}"
    assert lines[1]["not_after"] == certificate.not_valid_after_utc.isoformat()
    assert len(lines[1]["sha256"]) == 95


def test_the_name_from_the_federation_file(run: Run) -> None:
    peers = [{"id": peer, "address": f"127.0.0.1:{7400 + peer}"} for peer in (0, 1)]
    Path("peers.yaml").write_text(yaml.safe_dump({"federation": "skin", "peers": peers}))
    assert "request for peer 1 of federation skin" in run("request --id 1 --peers peers.yaml").output
    refused(run, "request --id 7 --peers peers.yaml", "peer id 7 is not in", code=ExitCode.CONFIGURATION)
    for options in ("", "--peers peers.yaml --federation skin"):
        refused(run, f"request --id 1 {options}", "give either --peers", code=ExitCode.USAGE)


@pytest.mark.parametrize("command", ["init-ca", "request --id 0"])
def test_names_that_no_federation_has(run: Run, command: str) -> None:
    for name in ("Colon", "a.b", "-a", "a_b", "a" * 64):
        refused(run, f"{command} --federation={name}", f"'{name}' must be lower-case", code=ExitCode.USAGE)


# --- nothing is overwritten -------------------------------------------------------------------------------------------


def test_a_ca_is_not_overwritten(run: Run) -> None:
    run("init-ca --federation colon")
    before = files("crad-ca")
    refused(run, "init-ca --federation colon", "is there already, and is not overwritten", "--out", code=ExitCode.USAGE)
    Path("crad-ca/ca.key").unlink()  # taken off line
    refused(run, "init-ca --federation colon", "crad-ca/ca.pem: is there already", code=ExitCode.USAGE)
    assert files("crad-ca") == {"ca.pem": before["ca.pem"]}


def test_a_key_is_not_overwritten(run: Run) -> None:
    run("request --id 0 --federation colon")
    before = files("crad-tls/0")
    refused(run, "request --id 0 --federation colon", "peer.key: is there already", "peer.csr", code=ExitCode.USAGE)
    assert files("crad-tls/0") == before
    run("init-ca --federation colon")
    run("sign crad-tls/0/peer.csr --id 0")
    refused(run, "sign crad-tls/0/peer.csr --id 0", "peer-0.pem: is there already", "--out", code=ExitCode.USAGE)
    run("install peer-0.pem --ca crad-ca/ca.pem")
    refused(run, "request --id 0 --federation colon", "crad-mesh certs renew", code=ExitCode.USAGE)


def test_a_key_without_request_and_certificate_gets_a_new_request(run: Run) -> None:
    """As the peer advises that finds it so."""
    enrol(run)
    before = Path("crad-tls/0/peer.key").read_bytes()
    Path("crad-tls/0/peer.pem").unlink()
    with pytest.raises(CertificateError) as raised:
        load_credentials(Path("crad-tls/0"), "colon", 0)
    advice = re.search(
        r"'crad-mesh certs (request [^']*)' makes a new request for the key that is there", str(raised.value)
    )
    assert advice, raised.value
    assert "for the key that is in crad-tls/0/peer.key already" in run(advice[1]).output.replace("\n", " ")
    refused(run, advice[1], "peer.key: is there already", "send crad-tls/0/peer.csr", code=ExitCode.USAGE)
    run("sign crad-tls/0/peer.csr --id 0 --out again.pem")
    run("install again.pem")
    assert Path("crad-tls/0/peer.key").read_bytes() == before
    load_credentials(Path("crad-tls/0"), "colon", 0)


def test_places_that_cannot_be_written(run: Run) -> None:
    Path("file").write_text("")
    refused(run, "init-ca --federation colon --out file/ca", "cannot be written", code=ExitCode.USAGE)
    refused(run, "request --id 0 --federation colon --tls-dir file/0", "cannot be written", code=ExitCode.USAGE)


# --- sign refuses -----------------------------------------------------------------------------------------------------


def test_requests_of_others(run: Run) -> None:
    run("init-ca --federation colon")
    run("request --id 0 --federation colon")
    run("request --id 1 --federation skin")
    refused(run, "sign crad-tls/0/peer.csr --id 2", "asks for peer 0", "expected peer 2", "nothing is signed")
    refused(run, "sign crad-tls/1/peer.csr --id 1", "federation 'skin'; expected federation 'colon'")
    refused(run, "sign crad-tls/0/peer.key --id 0", "holds a private key; expected a request")
    refused(run, "sign crad-tls/9/peer.csr --id 0", "crad-tls/9/peer.csr: is not there", "crad-mesh certs request")
    refused(run, "sign crad-tls/0/peer.csr --id 0 --ca elsewhere", "elsewhere/ca.pem: is not there", "init-ca")
    assert set(files("crad-ca")) == {"ca.pem", "ca.key"}
    assert not list(Path().glob("*.pem"))


# --- install refuses --------------------------------------------------------------------------------------------------


def test_certificates_that_do_not_fit(run: Run) -> None:
    run("init-ca --federation colon")
    for peer in (0, 1):
        run(f"request --id {peer} --federation colon")
        run(f"sign crad-tls/{peer}/peer.csr --id {peer}")
    before = files("crad-tls/0")
    ca = "--ca crad-ca/ca.pem"
    whose = "peer-1.pem: is the certificate of peer 1 of federation 'colon', and not for a key in crad-tls/0"
    refused(run, f"install peer-1.pem --tls-dir crad-tls/0 {ca}", whose, "there is peer.key")
    refused(run, f"install peer-0.pem --tls-dir elsewhere {ca}", "there is no key", "--tls-dir")
    refused(run, "install peer-0.pem", "crad-tls/0/ca.pem: is not there yet", "--ca", code=ExitCode.USAGE)
    refused(run, f"install crad-tls/0/peer.csr {ca}", "holds a request; expected a peer's certificate")
    refused(run, f"install crad-ca/ca.pem {ca}", "crad-ca/ca.pem: names no URI")
    run("init-ca --federation colon --out other")
    said = refused(run, "install peer-0.pem --ca other/ca.pem", "peer-0.pem: is from another CA, ", "other/ca.pem")
    assert fingerprint_in(run("inspect other/ca.pem").output, "") in said
    assert "renew" not in said  # there is nothing to renew yet
    refused(
        run, "install peer-0.pem --ca peer-1.pem", "peer-1.pem: holds a certificate, ", "not the certificate of a CA"
    )
    Path("crad-tls/0/peer.csr").write_bytes(to_pem(make_request(new_key(), "colon", 5)))
    refused(run, f"install peer-0.pem {ca}", "peer-0.pem: is for peer 0", "crad-tls/0/peer.csr asked for peer 5")
    assert {**files("crad-tls/0"), "peer.csr": before["peer.csr"]} == before


# --- renewal ----------------------------------------------------------------------------------------------------------


def test_renewal_leaves_what_is_in_use_until_the_answer_is_there(run: Run) -> None:
    old, before = enrol(run), files("crad-tls/0")
    assert "stays in use until" in run("renew").output
    assert mode("crad-tls/0/next.key") == 0o600
    assert set(files("crad-tls/0")) == {"ca.pem", "peer.pem", "peer.key", "next.key", "next.csr"}
    assert load_credentials(Path("crad-tls/0"), "colon", 0) == old
    refused(run, "renew", "a renewal is under way", "next.csr", code=ExitCode.USAGE)
    run("sign crad-tls/0/next.csr --id 0 --days 90 --out new.pem")
    run("install new.pem")
    new = load_credentials(Path("crad-tls/0"), "colon", 0)
    assert new.key_pem != old.key_pem
    assert new.ca_pem == old.ca_pem
    assert set(files("crad-tls/0")) == set(before)
    assert mode("crad-tls/0/peer.key") == 0o600


def test_which_directory_is_renewed(run: Run) -> None:
    refused(run, "renew", "no certificate is in crad-tls here", "--tls-dir", code=ExitCode.USAGE)
    refused(run, "renew --tls-dir none", "none/peer.pem: is not there", "crad-mesh certs request")
    enrol(run, 0)
    enrol(run, 1)
    refused(run, "renew", "certificates are in crad-tls/0, crad-tls/1", "--tls-dir", code=ExitCode.USAGE)
    assert "crad-tls/1/next.csr: request for peer 1" in run("renew --tls-dir crad-tls/1").output


@pytest.mark.parametrize("number", range(3))
def test_an_installation_that_was_interrupted_is_finished_by_the_same_command(
    run: Run, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    class Killed(BaseException):
        pass

    old = enrol(run)
    run("renew")
    run("sign crad-tls/0/next.csr --id 0 --out new.pem")
    rename, done = crad_p2p.durable.rename, 0

    def killing(source: Path, goal: Path) -> None:
        nonlocal done
        if done == number:
            raise Killed
        done += 1
        rename(source, goal)

    with monkeypatch.context() as patch:
        patch.setattr(crad_p2p.durable, "rename", killing)
        with pytest.raises(Killed):
            CliRunner().invoke(app, ["certs", "install", "new.pem", "--ca", "crad-ca/ca.pem"])
    if number < 2:
        assert load_credentials(Path("crad-tls/0"), "colon", 0) == old
    else:
        with pytest.raises(CertificateError, match=r"does not belong to the key .* \(again, if that was interrupted\)"):
            load_credentials(Path("crad-tls/0"), "colon", 0)
    run("install new.pem --ca crad-ca/ca.pem")
    assert load_credentials(Path("crad-tls/0"), "colon", 0).key_pem != old.key_pem
    assert set(files("crad-tls/0")) == {"ca.pem", "peer.pem", "peer.key"}


def test_the_ca_is_replaced_with_a_bundle(run: Run) -> None:
    """As docs/certificates.md says."""
    of_years_ago = new_authority("colon", datetime.now(UTC) - timedelta(days=3_000))
    Path("crad-ca").mkdir()
    Path("crad-ca/ca.pem").write_bytes(to_pem(of_years_ago.certificate))
    write_file(Path("crad-ca/ca.key"), key_to_pem(of_years_ago.key), 0o600)
    old = enrol(run)
    run("init-ca --federation other --out other-ca")
    made = run("init-ca --federation colon --out new-ca").output
    assert "cat new-ca/ca.pem crad-ca/ca.pem > both.pem" in made
    assert "crad-mesh certs renew" in made
    assert "crad-mesh certs request" not in made
    Path("both.pem").write_bytes(Path("new-ca/ca.pem").read_bytes() + Path("crad-ca/ca.pem").read_bytes())
    Path("both.pem").chmod(0o644)
    Path("both.pem").replace("crad-tls/0/ca.pem")
    assert load_credentials(Path("crad-tls/0"), "colon", 0).certificate == old.certificate
    run("renew")
    signed = run("sign crad-tls/0/next.csr --id 0 --out old.pem").output.replace("\n", " ")
    assert "Warning: new-ca/ca.pem is a newer CA of this federation" in signed
    assert "throw old.pem away, sign again with --ca new-ca" in signed
    assert "Warning" not in run("sign crad-tls/0/next.csr --id 0 --ca new-ca --out new.pem").output
    run("install new.pem")
    Path("crad-ca").rename("crad-ca-retired")
    assert len(load_authorities(Path("crad-tls/0/ca.pem"))) == 2
    run("renew")
    run("sign crad-tls/0/next.csr --id 0 --ca new-ca --out newer.pem")
    run("install newer.pem --ca new-ca/ca.pem")
    found = load_credentials(Path("crad-tls/0"), "colon", 0)
    assert found.ca_pem == Path("new-ca/ca.pem").read_bytes()


# --- inspect ----------------------------------------------------------------------------------------------------------


def test_inspect_files(run: Run) -> None:
    enrol(run)
    run("renew")
    assert "certificate of a CA, serialNumber=" in run("inspect crad-ca/ca.pem").output
    said = run("inspect peer-0.pem").output
    assert re.search(
        r"certificate of peer 0 of federation colon\n  valid +20.* UTC to 20.* UTC \(365 days left\)", said
    )
    assert "request for peer 0 of federation colon" in run("inspect crad-tls/0/next.csr").output
    key = run("inspect crad-tls/0/next.key").output
    assert "mode             0600" in key
    assert fingerprint_in(key, "key") == fingerprint_in(run("inspect crad-tls/0/next.csr").output, "key")
    assert "BEGIN" not in key
    refused(run, "inspect crad-ca/issued.jsonl", "holds no PEM block", "expected a certificate, a request or")
    refused(run, "inspect none", "none: is not there")
    Path("crad-tls/0/next.key").chmod(0o604)
    assert "mode             0604" in run("inspect crad-tls/0/next.key", CertificateError).output


def test_inspect_directories(run: Run) -> None:
    run("init-ca --federation colon")
    refused(run, "inspect crad-tls", "crad-tls: is not there")
    run("request --id 0 --federation colon")
    refused(run, "inspect crad-tls/0", "peer.pem: is not there", "have crad-tls/0/peer.csr signed")
    run("sign crad-tls/0/peer.csr --id 0 --days 20")
    run("install peer-0.pem --ca crad-ca/ca.pem")
    assert "crad-tls/0: accepted as peer 0 of federation colon\n" in run("inspect crad-tls/0").output
    assert "crad-ca: the CA of federation colon" in run("inspect crad-ca").output
    Path("crad-tls/0/peer.key").chmod(0o644)
    with pytest.raises(CertificateError) as caught:
        load_credentials(Path("crad-tls/0"), "colon", 0)
    assert refused(run, "inspect crad-tls/0") == str(caught.value)
    Path("empty").mkdir()
    refused(run, "inspect empty", "empty: holds no certificate", "such as crad-tls/0")


def test_what_is_wrong_with_a_directory_is_said_once(run: Run) -> None:
    enrol(run)
    Path("crad-tls/0/peer.key").write_text("junk")
    ended = run("inspect crad-tls/0", CertificateError)
    assert str(ended.exception).startswith("crad-tls/0/peer.key: holds no PEM block")
    assert "crad-tls/0/peer.key" not in ended.output
    Path("crad-tls/0/next.csr").write_text("junk")  # two things are two sentences
    assert "crad-tls/0/next.csr: holds no PEM block" in run("inspect crad-tls/0", CertificateError).output


def test_inspect_the_directory_of_directories(run: Run) -> None:
    enrol(run, 0)
    enrol(run, 1)
    said = run("inspect crad-tls").output
    assert "crad-tls/0: accepted as peer 0" in said
    assert "crad-tls/1: accepted as peer 1" in said
    Path("crad-tls/1/ca.pem").unlink()
    ended = run("inspect crad-tls", CertificateError)
    assert "crad-tls/0: accepted as peer 0" in ended.output
    assert "crad-tls/1/ca.pem: is not there" in ended.output
    assert str(ended.exception) == "crad-tls: not accepted is crad-tls/1, for the reasons above"


# --- advice that leads somewhere --------------------------------------------------------------------------------------


def test_a_spoilt_key_is_replaced_as_the_message_says(run: Run) -> None:
    enrol(run)
    Path("crad-tls/0/peer.key").write_text("junk")
    with pytest.raises(CertificateError, match="move it away first; then 'crad-mesh certs request --id 0 --federation"):
        load_credentials(Path("crad-tls/0"), "colon", 0)
    Path("crad-tls/0/peer.key").unlink()
    run("request --id 0 --federation colon")
    run("sign crad-tls/0/peer.csr --id 0 --out again.pem")
    run("install again.pem")
    assert load_credentials(Path("crad-tls/0"), "colon", 0).peer == 0


def test_a_spoilt_key_of_the_ca(run: Run) -> None:
    run("init-ca --federation colon")
    Path("crad-ca/ca.key").write_text("junk")
    said = refused(run, "inspect crad-ca", "crad-ca/ca.key: holds no PEM block", "put back the copy")
    assert "move it away" not in said


def test_a_certificate_that_was_too_old_when_it_came_is_signed_again(run: Run) -> None:
    """Nothing is in use yet that could be renewed."""
    run("init-ca --federation colon")
    run("request --id 0 --federation colon")
    request = load_request(Path("crad-tls/0/peer.csr"))
    authority = load_authority(Path("crad-ca"))
    early = datetime.now(UTC) - timedelta(days=20)
    Path("old.pem").write_bytes(to_pem(sign_request(authority, request, 0, 10, now=early)))
    said = refused(run, "install old.pem --ca crad-ca/ca.pem", "old.pem: expired on", "have peer.csr signed again")
    assert "renew" not in said


def test_renewing_what_has_expired(run: Run) -> None:
    credentials = enrol(run)
    authority = load_authority(Path("crad-ca"))
    request = make_request(credentials.key, "colon", 0)
    early = datetime.now(UTC) - timedelta(days=20)
    Path("crad-tls/0/peer.pem").write_bytes(to_pem(sign_request(authority, request, 0, 10, now=early)))
    said = run("renew").output
    assert re.search(r"peer\.pem: expired on 20.* UTC, and no peer accepts it", said)
    assert "stays in use" not in said


def test_who_has_had_a_certificate_needs_no_ca_with_the_next(run: Run) -> None:
    enrol(run, 0)
    run("renew")
    Path("next").mkdir()
    Path("crad-tls/0/next.csr").rename("request")  # it is listed what was signed before
    said = run("sign request --id 0 --out new.pem").output
    Path("request").rename("crad-tls/0/next.csr")
    assert "  crad-mesh certs install new.pem\nWith --ca and crad-ca/ca.pem it would trust that CA alone" in said
    run("init-ca --federation colon --out next-ca")  # with --ca its answer would drop the CA before too early
    assert "install new.pem\n" in run("sign crad-tls/0/next.csr --id 0 --ca next-ca --out next/new.pem").output
    run("request --id 1 --federation colon")
    with Path("crad-ca/issued.jsonl").open("a") as file:
        file.write("damaged\n")
    assert "  crad-mesh certs install peer-1.pem --ca ca.pem\n" in run("sign crad-tls/1/peer.csr --id 1").output


@pytest.mark.parametrize("days", [0, -1, 3651])
def test_how_long_a_certificate_may_be_good(run: Run, days: int) -> None:
    enrol(run)
    run("renew")
    refused(
        run,
        f"sign crad-tls/0/next.csr --id 0 --out new.pem --days {days}",
        f"--days {days}: must be from 1 to 3650",
        code=ExitCode.USAGE,
    )
    assert not Path("new.pem").exists()


def test_a_day_is_no_days(run: Run) -> None:
    run("init-ca --federation colon")
    run("request --id 0 --federation colon")
    assert "(1 day left)" in run("sign crad-tls/0/peer.csr --id 0 --days 1").output


# --- help -------------------------------------------------------------------------------------------------------------


def test_every_command_has_an_example() -> None:
    group = typer.main.get_command(app).commands["certs"]  # type: ignore[attr-defined]
    assert set(group.commands) == {"init-ca", "request", "sign", "install", "inspect", "renew"}
    for name, command in group.commands.items():
        assert f"Example: crad-mesh certs {name} " in command.help
