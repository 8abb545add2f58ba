"""darknight enclave: the job service inside a TEE."""

from __future__ import annotations

import hashlib
import sys
from json import dumps
from pathlib import Path
from typing import Annotated

from rich.console import Console

from darknight.cli.enclave_identity import enclave_identity
from darknight.cli.messages import LogLevel, messages_on, option
from darknight.errors import UsageError
from darknight.fleet.file import read_fleet_file
from darknight.service.configuration import Configuration
from darknight.service.program import EnclaveSettings, serve
from darknight.trust.platforms import CONFIGFS_TSM, GRAMINE, ConfigfsTsm, Gramine, Provider, find_provider
from darknight.trust.simulated_authority import ROOT_FILE
from darknight.trust.simulation import SoftwarePlatform, simulated_measurement

_SERVICE, _EVIDENCE, _OUTPUT = "Service", "Evidence", "Output"


def enclave(
    fleet: Annotated[Path, option(_SERVICE, "Fleet file with the workers.")] = Path("fleet.toml"),
    listen: Annotated[str, option(_SERVICE, "Where clients come: host:port.")] = "127.0.0.1:7700",
    state: Annotated[
        Path, option(_SERVICE, "Folder of the queue. It holds sealed files; nobody need trust the disk.")
    ] = Path("darknight-enclave"),
    insecure_one_operator: Annotated[
        bool, option(_SERVICE, "Let one operator hold all shares: nothing is hidden.", "--insecure-one-operator")
    ] = False,
    collateral: Annotated[
        Path | None, option(_EVIDENCE, "Intel's collateral for this machine's quotes; read anew for each client.")
    ] = None,
    certs: Annotated[
        list[Path] | None,
        option(_EVIDENCE, "For SEV-SNP: VCEK or VLEK, ASK and ARK, where the host hands out none. Repeatable."),
    ] = None,
    insecure_simulated_platform: Annotated[
        Path | None,
        option(_EVIDENCE, "Folder of a software platform, for machines without a TEE: it protects nothing."),
    ] = None,
    show: Annotated[
        bool, option(_OUTPUT, "Print what clients should expect of this enclave, and do not start it.", "--show")
    ] = False,
    json: Annotated[bool, option(_OUTPUT, "Print one JSON object when ready.", "--json")] = False,
    log_level: Annotated[LogLevel, option(_OUTPUT, "What is logged to stderr.")] = LogLevel.INFO,
) -> None:
    """Run the job service: clients send sealed data, release keys to this attested enclave, and get sealed results.

    Run it inside a TEE: Gramine on SGX, or a TDX or SEV-SNP guest (docs/howto/deploy-enclave.md). Jobs are done one
    after another, on the workers of the fleet file. Keys are in memory alone: after a restart each client releases them
    again, and its job goes on from the last sealed checkpoint. When it is ready it prints the certificate with which it
    speaks to workers, for their operators.

    Example, on a machine without a TEE, which protects nothing but shows everything:

        darknight enclave --fleet fleet.toml --insecure-simulated-platform platform

    Ctrl-C or SIGTERM finishes the step, saves, and stops.

    Exit codes: 0 shown, 1 a DarKnight error, 2 bad usage, 130 interrupted.
    """
    console = Console(stderr=True, highlight=False, emoji=False)
    settings = EnclaveSettings(fleet=fleet, listen=listen, state=state, insecure_one_operator=insecure_one_operator)
    if show:
        _show(settings, simulated=insecure_simulated_platform, json=json)
        return
    provider = _provider(collateral, tuple(certs or ()), insecure_simulated_platform)

    def ready(address: str, configuration: Configuration) -> None:
        words: dict[str, object] = {
            "address": address,
            "evidence": provider.name,
            "configuration": hashlib.sha256(configuration.encode()).hexdigest(),
            "workers": len(configuration.workers),
            "fingerprint": mine.fingerprint,
        }
        if isinstance(provider, SoftwarePlatform):
            words |= {"SIMULATED": True, "measurement": provider.measurement.hex()}
        # Inside a TEE nobody else can read the file: this is how the operators of workers get it.
        certificate = mine.certificate.decode()
        if json:
            print(dumps({**words, "certificate": certificate}), flush=True)
        else:
            for name, value in words.items():
                print(f"{name:<14}{value}")
            print("for --allow-enclave of the workers:")
            print(certificate, end="")
            print("ready", flush=True)

    with messages_on(console, log_level):
        mine = enclave_identity(read_fleet_file(fleet).identity)
        serve(settings, provider, ready=ready)


def _provider(collateral: Path | None, certificates: tuple[Path, ...], simulated: Path | None) -> Provider:
    if simulated is not None:
        if collateral is not None or certificates:
            raise UsageError(
                "--collateral and --certs are of real evidence; a software platform makes its own. Drop them."
            )
        print("darknight: SIMULATED evidence: this protects nothing and nobody.", file=sys.stderr)
        return SoftwarePlatform(simulated)
    if isinstance(find_provider(), ConfigfsTsm):
        return ConfigfsTsm(CONFIGFS_TSM, collateral=collateral, certificates=certificates)
    if certificates:
        raise UsageError("--certs is for SEV-SNP; this is Gramine on SGX. Drop it.")
    return Gramine(GRAMINE, collateral=collateral)


def _show(settings: EnclaveSettings, *, simulated: Path | None, json: bool) -> None:
    configuration = settings.configuration()
    digest = hashlib.sha256(configuration.encode()).hexdigest()
    measurement = None if simulated is None else simulated_measurement().hex()
    if json:
        found = {"configuration": digest, "measurement": measurement, "simulated": simulated is not None}
        print(dumps({**found, "workers": [vars(worker) for worker in configuration.workers]}, indent=2))
        return
    print(f"configuration  {digest}")
    for worker in configuration.workers:
        print(f"worker         {worker.name}, operator {worker.operator}, {worker.fingerprint}")
    if simulated is None:
        print("measurement    what the tool that built the enclave printed (docs/howto/deploy-enclave.md)")
        return
    print(f"measurement    {measurement} (SIMULATED)")
    print()
    print("# a policy for clients that want to try it:")
    print(f'measurements = ["{measurement}"]')
    print(f'configurations = ["{digest}"]')
    print(f'insecure_simulated_root = "{simulated / ROOT_FILE}"')
