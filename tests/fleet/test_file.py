"""The fleet file: what it says, and every mistake in words that name the file, the entry and the remedy."""

import os
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from darknight.errors import UsageError
from darknight.fleet.file import read_fleet_file
from darknight.wire.identity import WORKER, Identity, fingerprint

ONE, TWO = Identity.create(WORKER), Identity.create(WORKER)


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "one.pem").write_bytes(ONE.certificate)
    (tmp_path / "two.pem").write_bytes(TWO.certificate)
    return tmp_path


def entry(address="127.0.0.1:7001", operator="north", certificate="one.pem", **more) -> str:
    keys = {"address": address, "operator": operator, "certificate": certificate, **more}
    lines = [f"{key} = '''{value}'''" for key, value in keys.items() if value is not None]
    return "\n".join(["[[worker]]", *lines, ""])


def read(folder: Path, text: str):
    (folder / "fleet.toml").write_text(text)
    return read_fleet_file(folder / "fleet.toml")


def test_everything_that_a_file_can_say(folder):
    text = "[enclave]\nidentity = 'keys/mine'\n" + entry(name="first", shared_memory="@door")
    text += entry("[::1]:7002", "south", TWO.certificate.decode(), shared_memory="run/door")
    file = read(folder, text)
    assert file.path == folder / "fleet.toml"
    assert file.identity == folder / "keys" / "mine"
    first, second = file.workers
    assert (first.name, first.address, first.operator, first.shared_memory) == (
        *("first", "127.0.0.1:7001", "north", "@door"),
    )
    assert (second.name, second.address, second.operator) == ("[::1]:7002", "[::1]:7002", "south")
    assert second.shared_memory == str(folder / "run" / "door")
    assert [worker.fingerprint for worker in file.workers] == [
        fingerprint(ONE.certificate),
        fingerprint(TWO.certificate),
    ]
    assert not Path(file.identity).exists()  # reading makes nothing
    with pytest.raises(FrozenInstanceError):
        first.operator = "south"


def test_the_identity_is_beside_the_file_unless_it_says_otherwise(folder):
    assert read(folder, entry()).identity == folder / "enclave"


def test_a_path_may_be_relative_and_a_text(folder, monkeypatch):
    (folder / "fleet.toml").write_text(entry())
    monkeypatch.chdir(folder.parent)
    assert read_fleet_file(f"{folder.name}/fleet.toml").workers[0].fingerprint == fingerprint(ONE.certificate)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "it names no workers. Add a table [[worker]]"),
        ("worker = []\n", "it names no workers"),
        ("[worker]\naddress = 'a:1'\n", "it names no workers. Add a table [[worker]], with double brackets"),
        ("worker = ['a:1']\n", "it names no workers"),
        ("[[worker]\n", "not a TOML file"),
        ("[[workers]]\naddress = 'a:1'\n", "unknown workers; known are enclave, worker"),
        ("enclave = 'keys'\n" + entry(), "enclave is a str; needs a table, [enclave]"),
        ("[enclave]\nkey = 'x'\n" + entry(), "[enclave]: unknown key; known are identity"),
        ("[enclave]\nidentity = 3\n" + entry(), "[enclave]: identity is int; needs a text"),
        (
            entry(colour="red"),
            "worker 1: unknown colour; known are address, certificate, name, operator, shared_memory",
        ),
        (entry(address=None), "worker 1: no address. Add what the worker printed when it started"),
        (entry(operator=None, certificate=None), "worker 1: no operator, no certificate"),
        (entry() + entry("127.0.0.1:7002", certificate=None), "worker 2: no certificate"),
        (entry("127.0.0.1"), "worker 1: '127.0.0.1' is no address. Write host:port"),
        (entry("127.0.0.1:0"), "is no address"),
        (entry("127.0.0.1:65536"), "is no address"),
        (entry("::1:7001"), "is no address"),
        (entry("unix:/run/door:1"), "is no address"),
        (entry("dns:///host:7001"), "is no address"),
        (entry("user@host:7001"), "is no address"),
        (entry("-host:7001"), "is no address"),
        (entry("host:7001\n"), "address has signs that cannot be printed"),
        (entry(operator=" "), "worker 1: operator has 1 signs; needs 1 to 100, not only blanks"),
        (entry(operator="n" * 101), "operator has 101 signs"),
        (entry(operator="\\u001b[31m").replace("'''", '"'), "operator has signs that cannot be printed"),
        ("[[worker]]\naddress = 7001\noperator = 'n'\ncertificate = 'one.pem'\n", "address is int; needs a text"),
        (entry(certificate="none.pem"), "none.pem cannot be read: No such file or directory"),
        (entry(certificate="fleet.toml"), "fleet.toml is not a certificate in PEM form"),
        (entry(certificate="-----BEGIN CERTIFICATE-----\nAAAA\n"), "the text under certificate is not a certificate"),
        (entry(certificate=ONE.certificate.decode() * 2), "the text under certificate holds 2 certificates"),
        (entry(shared_memory="@" + "x" * 107), "shared_memory has 108 bytes; a Unix socket takes 107"),
        (entry() + entry(certificate="two.pem"), "worker 2: the same address as worker 1"),
        (entry("host:7001") + entry("HOST:07001", certificate="two.pem"), "worker 2: the same address as worker 1"),
        (entry() + entry("127.0.0.1:7002", "south"), "worker 2: the same certificate as worker 1"),
        (
            entry() + entry("127.0.0.1:7002", "south", ONE.certificate.decode()),
            "worker 2: the same certificate as worker 1. Each worker has a key of its own (--state DIR)",
        ),
        (
            entry(shared_memory="@a") + entry("127.0.0.1:7002", certificate="two.pem", shared_memory="@a"),
            "worker 2: the same shared_memory as worker 1",
        ),
        (
            entry(name="a") + entry("127.0.0.1:7002", certificate="two.pem", name="a"),
            "worker 2: the same name as worker 1",
        ),
    ],
)
def test_a_mistake_is_refused_in_words(folder, text, complaint):
    with pytest.raises(UsageError) as caught:
        read(folder, text)
    assert complaint in str(caught.value)
    assert str(folder / "fleet.toml") in str(caught.value)


def test_a_private_key_in_the_place_of_a_certificate_is_refused_and_not_shown(folder):
    with pytest.raises(UsageError, match="holds a private key") as caught:
        read(folder, entry(certificate=ONE.key.decode()))
    assert ONE.key.decode().splitlines()[1] not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(UsageError, match=r"none\.toml: cannot be read \(No such file or directory\)\. Give the path"):
        read_fleet_file(tmp_path / "none.toml")


def test_a_file_that_is_no_text(tmp_path):
    (tmp_path / "fleet.toml").write_bytes(os.urandom(100) + b"\xff")
    with pytest.raises(UsageError, match="not a TOML file"):
        read_fleet_file(tmp_path / "fleet.toml")
