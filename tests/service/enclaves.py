"""Real enclaves with simulated evidence: `darknight enclave` as a process, three workers, sealed data, a job file."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

import warm
from darknight.client.job_file import read_job_file
from darknight.client.job_folder import JobFolder
from darknight.client.jobs import Place
from darknight.data import pack_dataset, read_either
from darknight.trust.fresh import fresh_order
from darknight.trust.key_file import DataKey, KeyFile, write_key_file
from darknight.trust.policy import read_policy
from darknight.trust.sealing import write_sealed
from darknight.trust.simulation import simulated_measurement
from fleet.workers import ending, real_workers

OPERATORS = ("north", "south", "west")
EXAMPLES, SIDE, CLASSES = 44, 6, 3


def write_data(folder: Path, name: str = "data", *, seed: int = 0, labelled: bool = True) -> Path:
    """Images that a small network can tell apart: a bright stripe whose place is the class, in noise."""
    generator = np.random.default_rng(seed)
    labels = np.arange(EXAMPLES) % CLASSES
    images = generator.integers(0, 90, (EXAMPLES, 1, SIDE, SIDE), dtype=np.uint8)
    images[np.arange(EXAMPLES), 0, 2 * labels] += 150
    path = folder / f"{name}.npz"
    np.savez(path, x=images, **({"y": labels} if labelled else {}))
    return path


def seal(folder: Path, source: Path, name: str = "sealed") -> Path:
    data = read_either(str(source), seed=0)
    packed = pack_dataset(data, fresh_order(len(data)))
    (folder / name).mkdir()
    key = DataKey.fresh()
    manifest = write_sealed(
        folder / name,
        key,
        count=packed.count,
        record_bytes=packed.record_bytes,
        head=packed.head,
        records=packed.records(),
    )
    write_key_file(folder / f"{name}.key", KeyFile(key=key, manifest=manifest.digest))
    return folder / name


def write_policy(folder: Path, *, measurement: bytes | None = None) -> Path:
    path = folder / "policy.toml"
    root = folder / "platform" / "simulated-root.pem"
    measurement = simulated_measurement() if measurement is None else measurement
    path.write_text(f'measurements = ["{measurement.hex()}"]\ninsecure_simulated_root = "{root}"\n')
    return path


JOB = """
kind = "train"
output = "{output}"
policy = "policy.toml"
save_every = {every}

[data]
sealed = "{sealed}"
key = "{sealed}.key"

[model]
{model}

[recipe]
epochs = {epochs}
batch_size = {batch_size}
learning_rate = 0.05
seed = 5

[scheme]
inputs = 1
colluders = 1
"""


def write_job(
    folder: Path,
    *,
    output: str = "result",
    every: float = 0.0,
    epochs: int = 2,
    sealed: str = "sealed",
    model: str = 'name = "small-cnn"',
    batch_size: int = 9,
) -> Path:
    path = folder / f"{output}.toml"
    path.write_text(
        JOB.format(output=output, every=every, epochs=epochs, sealed=sealed, model=model, batch_size=batch_size)
    )
    return path


@dataclass
class Enclave:
    """A running `darknight enclave`."""

    process: subprocess.Popen
    address: str
    words: dict


CRASHING = Path(__file__).with_name("crashing.py")


def launch_enclave(
    folder: Path,
    *flags: str,
    port: int = 0,
    state: str = "state",
    crash: int | str | None = None,
    environment: dict | None = None,
    within: tuple[str, ...] = (),
    cwd: Path | None = None,
) -> Enclave:
    """crash: the operation on the disk before which it is killed; see service.crashing.

    within: a command that starts the one that follows it.
    """
    program = ["-m", "darknight.cli"] if crash is None else [str(CRASHING), str(crash), str(folder / state)]
    program += ["enclave", "--fleet", str(folder / "fleet.toml")]
    program += ["--listen", f"127.0.0.1:{port}", "--state", str(folder / state), "--json", *flags]
    program += ["--insecure-simulated-platform", str(folder / "platform"), "--log-level", "info"]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DARKNIGHT_")}
    with (folder / "enclave.log").open("ab") as log:
        kept |= {"OMP_NUM_THREADS": "1", **(environment or {})}
        start = partial(subprocess.Popen, [*within, sys.executable, *program], text=True)
        if not within:
            start = partial(warm.start, program)
        process = start(stdout=subprocess.PIPE, stderr=log, env=kept, cwd=cwd or folder)
    line = process.stdout.readline()
    assert line, f"the enclave ended with {process.wait()}: {(folder / 'enclave.log').read_text()}"
    words = json.loads(line)
    return Enclave(process, words["address"], words)


@contextmanager
def running_enclave(folder: Path, *flags: str, **options) -> Iterator[Enclave]:
    enclave = launch_enclave(folder, *flags, **options)
    with ending(enclave.process):
        yield enclave


@contextmanager
def workplace(folder: Path, flags: dict[str, dict[str, str]] | None = None) -> Iterator[Path]:
    """Three workers, a fleet file, sealed data, a policy: everything but the enclave and the job."""
    with real_workers(folder, flags or {operator: {} for operator in OPERATORS}) as workers:
        (folder / "fleet.toml").write_text("".join(worker.entry for worker in workers))
        seal(folder, write_data(folder))
        write_policy(folder)
        yield folder


class Quiet:
    """A `client.Watcher` that accepts whatever the policy accepts, and remembers what it was told."""

    def __init__(self):
        self.events, self.lost_count, self.confirmed = [], 0, 0

    def confirm(self, conversation):
        self.confirmed += 1
        return True

    def sending(self, name, size):
        return lambda number: None

    def lost(self, error):
        self.lost_count += 1

    def event(self, words):
        self.events.append(words)


def opened(path: Path) -> JobFolder:
    return JobFolder.open(read_job_file(path))


def place(folder: Path, address: str, *, patience: float = 0.0) -> Place:
    return Place(address=address, policy=read_policy(folder / "policy.toml"), patience=patience)
