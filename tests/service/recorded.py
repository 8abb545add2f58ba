"""A training job in an enclave that crashes twice, recorded from all sides by whoever owns the machine.

Taps stand between the client and the enclave, and between the enclave and its workers. Every file that ever lay in the
enclave's folder is kept, and it can write nowhere else. The same training without an enclave says what to look for.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from darknight.client.job_folder import JobFolder
from darknight.client.jobs import submit
from darknight.data import Dataset, read_dataset
from darknight.errors import ServiceError
from darknight.runtime import Runtime
from darknight.service.job import recipe_from_words, scheme_from_words
from darknight.train import Card, Checkpoint, Saving, Store, fit, protected
from darknight.train.batches import order_of
from darknight.train.checkpoint import read_checkpoint
from darknight.trust.simulated_authority import KEY_FILE, ROOT_FILE
from darknight.trust.simulation import SoftwarePlatform
from darknight.wire.job_channel import JobChannel
from fleet.observing import smooth_images
from fleet.test_on_the_wire import Conversation, Tap, taps_of
from fleet.workers import ending, real_workers
from service import confined
from service.enclaves import OPERATORS, Enclave, Quiet, launch_enclave, opened, place, seal, write_job, write_policy
from service.scanning import Sought
from service.watching import Kept, Watch

EXAMPLES, CLASSES = 50, 10
EPOCHS, BATCH = 4, 20
RUN = 12  # labels in a row that are no coincidence
PLATFORM = (f"platform/{ROOT_FILE}", f"platform/{KEY_FILE}")  # silicon, on a machine that has it
CONFINED = (sys.executable, confined.__file__)
LAYERS = """layers = [
  { type = "Flatten" },
  { type = "Linear", in_features = 576, out_features = 24 },
  { type = "ReLU" },
  { type = "Linear", in_features = 24, out_features = 10 },
]"""
ENDS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT)  # of the enclave: twice in the middle of the job, then after it


# --- what is recorded -------------------------------------------------------------------------------------------------
@dataclass
class Life:
    """One process of the enclave. core: how large one may be. read: whether another process may look into its memory.

    end: what the kernel said of it.
    """

    core: list[str]
    read: bool
    end: os.waitid_result | None = None


@dataclass
class Recording:
    """Of a job whose client has its files in `client`, and whose enclave can write to `enclave` alone.

    files: all that ever lay there, but for those that were there before. missed: how many of them were gone too soon.
    printed: to stdout. said: what client and enclave told each other, as it was before TLS. host: the workers' side.
    """

    client: Path
    host: Path
    enclave: Path
    job: JobFolder
    files: list[Kept] = field(default_factory=list)
    missed: int = 0
    lives: list[Life] = field(default_factory=list)
    result: dict[str, bytes] = field(default_factory=dict)
    printed: list[str] = field(default_factory=list)
    said: list[bytes] = field(default_factory=list)
    to_client: list[Conversation] = field(default_factory=list)
    to_workers: list[Conversation] = field(default_factory=list)


def streams(conversations: list[Conversation]) -> bytes:
    return b"".join(bytes(stream) for talk in conversations for stream in (talk.up, talk.down))


class _Ends(Quiet):
    """Ends the enclave as soon as it wrote the second checkpoint since it started."""

    def __init__(self, enclave: Enclave, how: signal.Signals) -> None:
        super().__init__()
        self._enclave, self._how = enclave, how

    def event(self, words: dict) -> None:
        super().event(words)
        if sum(each["kind"] == "checkpoint" for each in self.events) == 2:
            self._enclave.process.send_signal(self._how)


def record(folder: Path) -> Recording:
    client, host, enclave = (folder / name for name in ("client", "host", "enclave"))
    for path in (client, host, *(enclave / name for name in ("tmp", "home", "cwd"))):
        path.mkdir(parents=True)
    SoftwarePlatform(enclave / "platform")
    write_policy(enclave).rename(client / "policy.toml")
    seal(client, write_images(client))
    job = opened(write_job(client, epochs=EPOCHS, batch_size=BATCH, model=LAYERS))
    recording = Recording(client, host, enclave, job)
    with ExitStack() as stack:
        workers = stack.enter_context(real_workers(host, {operator: {} for operator in OPERATORS}))
        taps, entries = [], []
        for worker in workers:
            taps += taps_of(worker, stack)
            entries.append(worker.entry.replace(worker.address, taps[-2].address))
        fleet = f'[enclave]\nidentity = "{host / "enclave"}"\n\n' + "\n".join(entries)
        (enclave / "fleet.toml").write_text(fleet)
        stack.enter_context(_overheard(recording.said))
        watch = stack.enter_context(Watch(enclave, folder / "attic"))
        for how in ENDS:
            _live(recording, how)
    recording.files = [kept for kept in watch.files if not kept.names & {"fleet.toml", *PLATFORM}]
    recording.missed = watch.missed
    recording.to_workers = [talk for tap in taps for talk in tap.conversations]
    return recording


def _live(recording: Recording, how: signal.Signals) -> None:
    """One life of the enclave, to the end that `how` is."""
    folder = recording.enclave
    # Without the last one torch asks Python for a temporary folder, which writes a few bytes there to see if it can.
    environment = {name: str(folder / path) for name, path in (("TMPDIR", "tmp"), ("HOME", "home"))}
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "cache")
    within = (*CONFINED, str(folder), "--")
    enclave = launch_enclave(folder, environment=environment, within=within, cwd=folder / "cwd")
    with ending(enclave.process), Tap(enclave.address) as tap:
        life = Life(core_limits(enclave.process.pid), can_be_read(enclave.process.pid))
        recording.lives.append(life)
        last = how == ENDS[-1]
        watcher = Quiet() if last else _Ends(enclave, how)
        try:
            recording.result = submit(recording.job, place(recording.client, tap.address), watcher)
            assert last, "the job was finished before the enclave could be ended"
            enclave.process.send_signal(how)
        except ServiceError:
            if last:
                raise
        life.end = os.waitid(os.P_PID, enclave.process.pid, os.WEXITED | os.WNOWAIT)
        recording.printed.append(f"{enclave.words}\n{enclave.process.stdout.read()}")
    recording.to_client += tap.conversations


@contextmanager
def _overheard(said: list[bytes]) -> Iterator[None]:
    """Everything that the client's end of the channel is given and gives, before and after TLS."""
    ask, listen, send = JobChannel.ask, JobChannel.listen, JobChannel.send

    def heard(part: bytes) -> bytes:
        said.append(part)
        return part

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JobChannel, "ask", lambda self, method, message: heard(ask(self, method, heard(message))))
        patch.setattr(
            JobChannel, "listen", lambda self, method, message: map(heard, listen(self, method, heard(message)))
        )
        patch.setattr(
            JobChannel, "send", lambda self, message, chunks: heard(send(self, heard(message), map(heard, chunks)))
        )
        yield


def core_limits(process: int) -> list[str]:
    """How large a core of it may be, and may at most be allowed to be."""
    lines = Path(f"/proc/{process}/limits").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("Max core file size"))
    return line.split()[4:6]


def can_be_read(process: int) -> bool:
    """Whether another process of the same account may look into its memory, without the superuser's privileges."""
    look = f"open('/proc/{process}/environ', 'rb').read()"
    command = [*CONFINED, "--", sys.executable, "-c", look]
    return subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == 0


# --- what is looked for -----------------------------------------------------------------------------------------------
def write_images(folder: Path) -> Path:
    """(example, 1, 24, 24) bytes, and labels that say nothing of them."""
    images = (smooth_images(EXAMPLES, seed=40) * 100 + 128).to(torch.uint8)
    path = folder / "data.npz"
    np.savez(path, x=images.numpy(), y=np.random.default_rng(41).integers(0, CLASSES, EXAMPLES))
    return path


@dataclass
class Truth:
    """What was in the enclave's memory. folder: of the same training without an enclave, whose files are plain."""

    folder: Path
    data: Dataset
    checkpoints: list[Checkpoint]


def train_alone(folder: Path, recording: Recording) -> Truth:
    """Arithmetic in a field is exact: without workers it gives the same bits."""
    text = recording.job.text
    recipe, data = recipe_from_words(text.recipe), read_dataset(str(recording.client / "data.npz"), seed=0)
    card = Card.of("described", data, dict(text.model))
    model = card.network(seed=recipe.seed)
    runtime = Runtime(scheme_from_words(text.scheme), None, seed=recipe.seed)
    with Store(folder, keep=1000) as store, runtime, protected(model, runtime):
        fit(model, data, recipe, runtime=runtime, saving=Saving(store=store, card=card, every=0.0))
        return Truth(folder, data, [read_checkpoint(path) for path in store.checkpoints()])


def sought_of(recording: Recording, truth: Truth, figures: list[float]) -> Sought:
    data = truth.data
    normalised = torch.cat([data.train_x, data.test_x])
    with np.load(recording.client / "data.npz") as arrays:
        raw, labels = arrays["x"], arrays["y"]
    images = [raw, normalised.numpy(), normalised.double().numpy()]  # two small whole numbers in a row are everywhere
    tensors = [point.optimizer for point in truth.checkpoints], [point.model for point in truth.checkpoints]
    momentum, weights = ([t.numpy().tobytes() for each in kind for t in each.values()] for kind in tensors)
    recipe = truth.checkpoints[0].recipe
    orders = [
        data.train_y[chosen] for epoch in range(1, EPOCHS + 1) for chosen in order_of(recipe, epoch, len(data.train))
    ]
    sequences = [labels, data.train_y.numpy(), data.test_y.numpy(), *(order.numpy() for order in orders)]
    few = torch.linspace(0, len(normalised) - 1, 5).long()
    return Sought(
        images=normalised[few].flatten(1),
        unused=smooth_images(2, seed=42).flatten(1),
        long={"images": [each.tobytes() for each in images], "momentum": momentum, "weights": weights},
        short={
            "labels": [needle for sequence in sequences for needle in _runs(sequence)],
            "keys": [needle for key in keys_of(recording) for needle in _halves(key)],
            "private keys": PRIVATE_KEYS,
            "figures": [needle for figure in figures for needle in _digits(figure)],
        },
    )


# How every private key of the kinds that we use begins, in PEM and in DER.
PRIVATE_KEYS = [
    b"PRIVATE KEY-----",
    bytes.fromhex("0201010420"),
    *(bytes.fromhex(f"06032b65{n}04220420") for n in ("70", "6e")),
]


def _runs(labels: np.ndarray) -> list[bytes]:
    """As numbers of any type, or one-hot."""
    found = []
    for begin in range(0, len(labels) - RUN + 1, 4):
        run = labels[begin : begin + RUN]
        found += [run.astype(form).tobytes() for form in ("u1", "<i2", "<i4", "<i8", "<f4", "<f8")]
        found += [np.eye(CLASSES)[run].astype(form).tobytes() for form in ("u1", "<i8", "<f4")]
    return found


def _halves(key: bytes) -> list[bytes]:
    """Also as Python writes it, without spaces: see `scanning.readings`."""
    half = len(key) // 2
    return [key[:half], key[half:], "".join(repr(key)[2:-1].split()).encode()]


def _digits(figure: float) -> list[bytes]:
    """Only if they are many: 0.5 is everywhere."""
    text = repr(figure).encode()
    return [text, np.float64(figure).tobytes()] if len(text) > 8 else []


def keys_of(recording: Recording) -> list[bytes]:
    """The client's, and all that are derived from them, down to those that encrypt."""
    job, purposes = recording.job, ("checkpoint", "result", "weights", "client")
    derived = {purpose: job.keys.derived(purpose).raw for purpose in purposes}
    manifest = bytes.fromhex(job.text.data)
    found = [job.keys.data.raw, job.keys._job, *derived.values()]
    found.append(_derive(job.keys.data.raw, manifest, b"darknight records 1"))
    found.append(_blob_key(job.keys.data.raw, job.sealed / "head", b"darknight head 1 " + manifest))
    for kept in recording.files:
        name = min(kept.names).rpartition("/")[2].removeprefix(".unfinished-")
        if name.startswith("checkpoint-"):
            label = f"{job.text.name} checkpoint {int(name.split('-')[1])}".encode()
            found.append(_blob_key(derived["checkpoint"], kept.path, label))
        elif name == "result.sealed":
            found.append(_blob_key(derived["result"], kept.path, f"{job.text.name} result".encode()))
    return found


def _blob_key(key: bytes, path: Path, label: bytes) -> bytes:
    """As darknight.trust.blob says."""
    with path.open("rb") as file:
        salt = file.read(36)[4:]
    return _derive(key, salt, b"darknight blob 1" + len(label).to_bytes(8, "big") + label)


def _derive(key: bytes, salt: bytes, info: bytes) -> bytes:
    return HKDF(SHA256(), 32, salt=salt, info=info).derive(key)
