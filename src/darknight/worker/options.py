"""The worker's command line: flags, their DARKNIGHT_WORKER_* variables, and what each of them may be."""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from darknight import __version__
from darknight.errors import UsageError
from darknight.ops.strategy import STRATEGIES
from darknight.wire.hostile import INSECURE_VARIABLE, Plan, require_insecure
from darknight.worker.budget import size_from
from darknight.worker.choice import MEASURED, strategy_names
from darknight.worker.logs import LEVELS

PROGRAM = "darknight worker"
_VARIABLE = "DARKNIGHT_WORKER_"
_LEAST_MEMORY = 1 << 20

_DESCRIPTION = """\
Computes for enclaves: multiplies masked shares with public weights, and knows nothing else.
It serves only the enclaves whose certificates it is given, over TLS 1.3, and needs nothing else of DarKnight."""

_EPILOG = """\
example, on the operator's machine (the enclave's owner sent enclave.pem):
  python -m darknight.worker --listen 0.0.0.0:7001 --operator acme --memory-limit 8GiB --allow-enclave enclave.pem
It prints a fingerprint and an entry for the fleet file: send the entry back, and compare the fingerprint by telephone.

Every flag can also be given as a variable: DARKNIGHT_WORKER_LISTEN, DARKNIGHT_WORKER_MEMORY_LIMIT, ... (several
certificates in DARKNIGHT_WORKER_ALLOW_ENCLAVE are separated by colons). A flag wins over its variable. Only --hostile
has none, so that nobody lies by accident.

exit codes: 0 stopped (SIGTERM), 1 failed, 2 wrong usage, 130 stopped with Ctrl-C."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What was asked for; each value is checked for itself, not yet against the machine."""

    listen: str
    pipe_port: int | None
    device: str
    threads: int | None
    strategy: str
    memory_limit: int | None
    operator: str
    engine: str
    ray_address: str | None
    ray_actors: int | None
    allow_enclave: tuple[Path, ...]
    state: Path
    metrics: tuple[str, int] | None
    enclaves: int | None
    shared_memory: str | None
    grace: float
    log_level: str
    log_format: str
    hostile: Plan | None


@dataclass(frozen=True)
class _Variable:
    """A value from the environment. argparse would blame the flag for it, so it is read after argparse is done."""

    name: str
    text: str
    kind: Callable[[str], Any]

    def __str__(self) -> str:  # in --help
        return self.text


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{PROGRAM}: error: {message}\n")


def options_parser(environment: Mapping[str, str]) -> argparse.ArgumentParser:
    """The reader of the flags; a variable of `environment` takes the place of a flag's default."""
    parser = _Parser(
        prog=PROGRAM,
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )

    def flag(name: str, kind: Callable[[str], Any], default: str | None, help_text: str, metavar: str) -> None:
        variable = _VARIABLE + name.removeprefix("--").replace("-", "_").upper()
        given = environment.get(variable)
        value = default if given is None else _Variable(variable, given, kind)
        parser.add_argument(name, type=kind, default=value, help=help_text, metavar=metavar)

    flag("--listen", _address, "127.0.0.1:7001", "where to listen; port 0 takes any (default %(default)s)", "HOST:PORT")
    pipes = "second port, for tensors: 0 takes any (default), none: all goes through the first, which is slower"
    flag("--pipe-port", _port, "0", pipes, "PORT")
    flag("--device", str, "cpu", "cpu, or cuda:N (default cpu)", "DEVICE")
    flag("--threads", _count, None, "threads of the processor to compute with (default: all cores)", "N")
    how = f"how to compute in the field: measured takes the fastest (default), or one of {', '.join(STRATEGIES)}"
    flag("--strategy", _one_of(*strategy_names()), MEASURED, how, "NAME")
    flag("--memory-limit", _size, None, "for all enclaves together (default: half of the memory)", "SIZE")
    flag("--operator", _name, _host_name(), "who runs this worker, as in the fleet file (default: this host)", "NAME")
    flag("--engine", _one_of("local", "ray"), "local", "local, or ray: this operator's Ray cluster", "local|ray")
    flag("--ray-address", str, None, "the cluster's address (default: a Ray of this worker's own)", "ADDRESS")
    flag("--ray-actors", _count, None, "processes of the cluster to compute with (default: one a device)", "N")
    parser.add_argument(
        "--allow-enclave",
        type=Path,
        action="append",
        metavar="CERT",
        help="certificate (PEM file) of an enclave to serve; repeat for several; at least one is needed",
    )
    flag("--state", Path, _state_folder(environment), "key.pem, certificate.pem; made if absent (%(default)s)", "DIR")
    flag("--metrics", _host_port, None, "Prometheus /metrics, and /healthz, here (default: nowhere)", "HOST:PORT")
    flag("--enclaves", _count, None, "places for connections; each has an equal part of the memory (4)", "N")
    flag("--shared-memory", _name, None, "Unix socket for enclaves of this machine: a path, or @name", "NAME")
    flag("--grace", _seconds, "10", "for tasks under way when it is stopped, in seconds (default 10)", "SECONDS")
    flag("--log-level", _one_of(*LEVELS), "info", f"{', '.join(LEVELS)} (default info)", "LEVEL")
    flag("--log-format", _one_of("text", "json"), "text", "text (key=value) or json (default text)", "FORMAT")
    parser.add_argument(
        "--hostile",
        type=_plan,
        metavar="PLAN",
        help=f"for tests: lie as PLAN says, such as noise:passes=forward; only with {INSECURE_VARIABLE}=1",
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    return parser


def read_options(argv: list[str] | None, environment: Mapping[str, str] = os.environ) -> Options:
    """The options of a command line. Ends the program, as argparse does, on --help and on mistakes (exit code 2)."""
    parser = options_parser(environment)
    found = vars(parser.parse_args(argv))
    if found["hostile"] is not None:
        try:
            require_insecure(environment)
        except UsageError as error:
            parser.error(f"argument --hostile: {error}")
    for name, value in found.items():
        if isinstance(value, _Variable):
            try:
                found[name] = value.kind(value.text)
            except argparse.ArgumentTypeError as error:
                parser.error(f"variable {value.name}: {error}")
    if found["allow_enclave"] is None:
        listed = environment.get(_VARIABLE + "ALLOW_ENCLAVE", "")
        found["allow_enclave"] = [Path(part) for part in listed.split(os.pathsep) if part]
    if not found["allow_enclave"]:
        parser.error(
            "a worker serves only enclaves that it knows: --allow-enclave CERT is missing. The enclave's owner makes "
            "a certificate with `darknight fleet identity` and sends you certificate.pem."
        )
    for name in ("ray_address", "ray_actors"):
        if found[name] is not None and found["engine"] != "ray":
            parser.error(f"--{name.replace('_', '-')} is about a Ray cluster; add --engine ray, or leave it out.")
    if found["strategy"] != MEASURED and found["engine"] == "ray":
        parser.error("--strategy is about this machine's device; every actor of a Ray cluster measures its own.")
    return Options(**{**found, "allow_enclave": tuple(found["allow_enclave"])})


def _state_folder(environment: Mapping[str, str]) -> str:
    base = environment.get("XDG_DATA_HOME") or os.path.join("~", ".local", "share")
    return os.path.join(os.path.expanduser(base), "darknight", "worker")


def _host_name() -> str:
    return socket.gethostname()[:100] or "unknown"


# --- the kinds of values; argparse shows ArgumentTypeError's words ----------------------------------------------------
def _host_port(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not host or not (port.isascii() and port.isdecimal()) or int(port) > 65535:
        raise argparse.ArgumentTypeError(f'"{text[:100]}" is not HOST:PORT, such as 127.0.0.1:7001 or [::]:7001.')
    return host.removeprefix("[").removesuffix("]"), int(port)


def _address(text: str) -> str:
    _host_port(text)
    return text


def _port(text: str) -> int | None:
    if text == "none":
        return None
    if not (text.isascii() and text.isdecimal()) or int(text) > 65535:
        raise argparse.ArgumentTypeError(f'"{text[:40]}" is not a port from 0 to 65535, or none.')
    return int(text)


def _size(text: str) -> int:
    try:
        size = size_from(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if size < _LEAST_MEMORY:  # a unit was forgotten
        raise argparse.ArgumentTypeError(f'"{text[:40]}" is {size:,} bytes: too few for a task. Write 512MiB or 8GiB.')
    return size


def _count(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or not 1 <= int(text) <= 4096:
        raise argparse.ArgumentTypeError(f'"{text[:40]}" is not a number from 1 to 4096.')
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f'"{text[:40]}" is not a number of seconds from 0 to 3600.')
    return seconds


def _name(text: str) -> str:
    if not 1 <= len(text) <= 100 or not text.isprintable():
        raise argparse.ArgumentTypeError("needs 1 to 100 printable characters.")
    return text


def _plan(text: str) -> Plan:
    try:
        return Plan.parse(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _one_of(*known: str) -> Callable[[str], str]:
    def check(text: str) -> str:
        if text not in known:
            raise argparse.ArgumentTypeError(f'"{text[:40]}" is none of {", ".join(known)}.')
        return text

    return check
