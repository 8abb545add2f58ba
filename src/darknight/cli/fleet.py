"""darknight fleet: make the enclave's certificate, look at a fleet file, try its workers, measure the wire."""

from __future__ import annotations

from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from darknight.bench import Transports, measure_transports
from darknight.cli.enclave_identity import enclave_identity
from darknight.cli.fleet_tables import bench_table, check_table, count_of_workers, list_table, transports_table
from darknight.cli.fleet_visits import Visit, plan_words, visit_all
from darknight.cli.messages import LogLevel, messages_on, option
from darknight.cli.progress import display_on
from darknight.cli.scheme_options import SchemeOptions
from darknight.errors import UsageError
from darknight.fleet.file import FleetFile, read_fleet_file
from darknight.wire.identity import CERTIFICATE_FILE, ENCLAVE, KEY_FILE, Identity
from darknight.worker.budget import size_from

fleet = typer.Typer(no_args_is_help=True, help="Workers of a fleet file: make it, look at it, try them.")

_FILE = typer.Argument(help="The fleet file.", show_envvar=False)
_MASKING, _OUTPUT = "Masking", "Output"
_JSON = option(_OUTPUT, "Print one JSON object.", "--json")
_LOG = option(_OUTPUT, "What is logged to stderr.")
_LEAST, _MOST = 1 << 10, 1 << 32


@fleet.command("identity")
def identity(
    out: Annotated[Path, option(_OUTPUT, "Folder for key.pem and certificate.pem.")] = Path("enclave"),
    json: Annotated[bool, _JSON] = False,
) -> None:
    """Make the key and the certificate with which this enclave speaks to workers.

    Operators start their workers with the certificate; the key never leaves this machine. What is there already is
    kept. dk.connect does the same on its first call.

    Example, in the folder of the fleet file:

        darknight fleet identity --out enclave

    Exit codes: 0 done, 2 bad usage (such as a folder that cannot be written, or that holds only half of it).
    """
    was_there = (out / KEY_FILE).exists()
    mine = Identity.load_or_create(out, ENCLAVE)
    certificate = out / CERTIFICATE_FILE
    if json:
        found = {"certificate": str(certificate), "fingerprint": mine.fingerprint, "new": not was_there}
        print(dumps(found, indent=2))
        return
    print(f"key          {out / KEY_FILE} ({'was there' if was_there else 'new'}; keep it here)")
    print(f"certificate  {certificate}")
    print(f"fingerprint  {mine.fingerprint}")
    print()
    print(f"Give {certificate} to each operator, who starts a worker with it:")
    print(f"    darknight worker --listen 0.0.0.0:7001 --operator NAME --allow-enclave {CERTIFICATE_FILE}")
    print("Tell the fingerprint by another way, and let them compare. Each worker prints an entry for the fleet file.")


@fleet.command("list")
def list_(file: Annotated[Path, _FILE], json: Annotated[bool, _JSON] = False) -> None:
    """Show what a fleet file says. Nobody is connected to.

    Example:

        darknight fleet list fleet.toml

    Exit codes: 0 done, 2 a file with a mistake.
    """
    found = read_fleet_file(file)
    if json:
        workers = [
            {
                "name": entry.name,
                "address": entry.address,
                "operator": entry.operator,
                "fingerprint": entry.fingerprint,
                "shared_memory": entry.shared_memory,
            }
            for entry in found.workers
        ]
        print(dumps({"file": str(file), "identity": str(found.identity), "workers": workers}, indent=2))
    else:
        _show(list_table(found))


@fleet.command("check")
def check(
    file: Annotated[Path, _FILE],
    inputs: Annotated[int | None, option(_MASKING, "K of the scheme that is planned.")] = None,
    colluders: Annotated[int | None, option(_MASKING, "M of the scheme that is planned.")] = None,
    spares: Annotated[int | None, option(_MASKING, "E of the scheme that is planned.")] = None,
    timeout: Annotated[float, option(_OUTPUT, "Seconds for each worker.")] = 10.0,
    json: Annotated[bool, _JSON] = False,
    log_level: Annotated[LogLevel, _LOG] = LogLevel.WARNING,
) -> None:
    """Connect to every worker of a fleet file, as a training would, and say what is there.

    Each one must answer under its certificate, belong to its operator, and send a tiny tensor back. With --inputs,
    --colluders or --spares it also says how many shares of a masking each operator would hold.

    Example:

        darknight fleet check fleet.toml --inputs 1 --colluders 1

    Exit codes: 0 all is well, 1 something is not, 2 bad usage, 130 interrupted.
    """
    if not 0 < timeout <= 3600:
        raise UsageError(f"--timeout {timeout:g}; needs seconds, more than 0 and at most 3600.")
    asked = SchemeOptions(inputs=inputs, colluders=colluders, spares=spares)
    found = read_fleet_file(file)
    plan = plan_words(found, asked.scheme()) if asked != SchemeOptions() else None
    visits = _visit(found, log_level, nbytes=4, times=5, timeout=timeout)
    well = all(visit.ok for visit in visits) and (plan is None or plan["ok"])
    if json:
        print(
            dumps({"file": str(file), "ok": well, "workers": [_visit_words(v) for v in visits], "plan": plan}, indent=2)
        )
    else:
        _show(check_table(visits, plan))
    if not well:
        raise typer.Exit(1)


@fleet.command("bench")
def bench(
    file: Annotated[Path | None, typer.Argument(help="The fleet file.  [default: this machine alone]")] = None,
    size: Annotated[str, option("Measurement", "Of the tensor, there and back.")] = "64MiB",
    times: Annotated[int, option("Measurement", "Rounds; the best counts.")] = 9,
    json: Annotated[bool, _JSON] = False,
    log_level: Annotated[LogLevel, _LOG] = LogLevel.WARNING,
) -> None:
    """Measure how long a tensor takes to a worker and back.

    Without a file two workers are started on this machine, one for each transport, and both are compared in one run
    with the least that they could cost: shared memory with a plain copy there and, into fresh memory, back; gRPC with a
    raw TLS 1.3 socket. With a file, each of its workers is measured. The task is a linear layer with the single weight
    1, so the same tensor comes back; the time that workers say they computed is taken off.

    Example:

        darknight fleet bench fleet.toml --size 16MiB

    Exit codes: 0 done, 1 a worker failed, 2 bad usage, 130 interrupted.
    """
    nbytes = _size(size)
    if not 1 <= times <= 1000:
        raise UsageError(f"--times {times}; needs a whole number from 1 to 1000.")
    if file is not None:
        visits = _visit(read_fleet_file(file), log_level, nbytes=nbytes, times=times, timeout=60.0)
        if json:
            words = [_visit_words(visit) for visit in visits]
            print(dumps({"size_bytes": nbytes, "times": times, "workers": words}, indent=2))
        else:
            _show(bench_table(visits, nbytes, times))
        if not all(visit.ok for visit in visits):
            raise typer.Exit(1)
        return
    console = Console(stderr=True, highlight=False, emoji=False)
    with messages_on(console, log_level), display_on(console) as display, display.stage("measuring the transports"):
        found = measure_transports(nbytes, times=times)
    if json:
        print(dumps(_transport_words(found), indent=2))
    else:
        _show(transports_table(found))


def _visit(file: FleetFile, log_level: LogLevel, *, nbytes: int, times: int, timeout: float) -> list[Visit]:
    console = Console(stderr=True, highlight=False, emoji=False)
    with messages_on(console, log_level), display_on(console) as display:
        me = enclave_identity(file.identity)
        with display.stage(f"visiting {count_of_workers(len(file.workers))}"):
            return visit_all(file, me, nbytes=nbytes, times=times, timeout=timeout)


def _visit_words(visit: Visit) -> dict[str, Any]:
    return {**asdict(visit), "ok": visit.ok}


def _transport_words(found: Transports) -> dict[str, Any]:
    ratios = {"shared_memory": found.shared_memory_ratio, "pipe": found.pipe_ratio, "grpc_tls": found.grpc_tls_ratio}
    return {
        "size_bytes": found.nbytes,
        "times": found.times,
        "seconds": {
            "copy": found.copy,
            "shared_memory": found.shared_memory,
            "tls_socket": found.tls_socket,
            "pipe": found.pipe,
            "grpc_tls": found.grpc_tls,
        },
        "ratios": ratios,
    }


def _size(text: str) -> int:
    try:
        nbytes = size_from(text)
    except ValueError as error:
        raise UsageError(f"--size: {error}") from None
    if not _LEAST <= nbytes <= _MOST:
        raise UsageError(f"--size {text}; needs a size from 1KiB to 4GiB.")
    return nbytes


def _show(table: Any) -> None:
    Console(highlight=False, emoji=False).print(table)
