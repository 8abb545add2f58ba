"""What this release writes, kept so that later ones can show that they still open it, or refuse it in words.

    PYTHONPATH=src:tests python tests/formats/make_fixtures.py

makes tests/formats/fixtures/VERSION. A folder that is there is never written again: it is what that release wrote. The
data key in it is a key of these fixtures alone.
"""

import sys
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

import darknight as dk
from darknight.client.seal import Destination, seal_dataset
from darknight.data import read_dataset
from darknight.service.sealed_store import SealedStore
from darknight.train.checkpoint import Checkpoint, write_checkpoint
from darknight.train.store import Store
from darknight.trust.blob import seal_bytes
from darknight.trust.key_file import DataKey
from darknight.trust.release import Receipt
from darknight.types import Answer, BackwardTask, Forget, ForwardTask, OpSpec, Pass, Refusal, Seed, Weights
from darknight.wire import codec, handshake
from darknight.wire.jobs import JobText, dump
from train.saved import SCHEME, StopAfter, network, protected, train

FIXTURES = Path(__file__).resolve().parent / "fixtures"
STOPPED_AT = 6  # of eight steps: the last that was kept, in the middle of the second epoch
KEY = DataKey(bytes(range(32)))
LABEL = b"fixture"
JOB = "44" * 16
SECRET = b"what a release sealed, the next one opens"
ABOUT = {"operator": "north", "device": "cpu", "memory": 1 << 30}
TOKEN = bytes(range(16))


def openings(protocol: int = handshake.PROTOCOL) -> dict[str, bytes]:
    """The first frame in each direction, on a link to another machine and on one within a machine."""
    return {
        "hello": handshake.hello(None, protocol),
        "hello-door": handshake.hello(TOKEN, protocol),
        "welcome": handshake.welcome(ABOUT, None, protocol),
        "welcome-door": handshake.welcome(ABOUT, TOKEN, protocol),
        "refusal": handshake.refusal("no place is free", protocol),
    }


def headers(protocol: int = handshake.PROTOCOL) -> dict[str, bytes]:
    """One header of each kind of message. What is in it is what a worker of the protocol must understand."""
    tensor = torch.zeros(2, 3, dtype=torch.int32)
    messages = {
        "weights": Weights(layer="0", version=1, op=OpSpec("linear", ()), prime=2**28 - 57, tensor=tensor),
        "forward": ForwardTask(layer="0", call=4, version=1, tensor=tensor, compute=True, keep=True),
        "backward": BackwardTask(
            layer="0", call=4, version=1, tensor=tensor, passes=(Pass.GRAD_INPUT,), x_shape=(2, 3), row=None
        ),
        "forget": Forget(calls=(4,), weights=(("0", 1),), everything=False),
    }
    if protocol >= handshake.SEEDS:
        seed = Seed(key=bytes(range(32)), prime=2**28 - 57)
        messages |= {f"{name}-seed": replace(messages[name], seed=seed) for name in ("forward", "backward")}
    replies = {
        "answer": Answer(layer="0", call=4, tensors={Pass.FORWARD: tensor}, seconds=0.5),
        "refused": Refusal(message="weights never arrived"),
    }
    made = {name: codec.pack(codec.header_of(message)) for name, message in messages.items()}
    return made | {name: codec.pack(codec.reply_header(reply)) for name, reply in replies.items()}


def job() -> JobText:
    return JobText(
        salt="11" * 32,
        client="22" * 32,
        kind="train",
        model={"name": "small-cnn"},
        weights=None,
        recipe={"epochs": 1, "batch_size": 8, "learning_rate": 0.05},
        augment=False,
        scheme={"inputs": 4, "colluders": 1},
        leakage_budget=None,
        save_every=60.0,
        data="33" * 32,
        part="all",
        top=1,
    )


def seven() -> tuple[np.ndarray, np.ndarray]:
    """Seven images of 2 x 3 bytes with labels."""
    return np.arange(42, dtype=np.uint8).reshape(7, 2, 3) * 5, np.arange(7) % 3


def make(folder: Path) -> None:
    folder.mkdir(parents=True)
    for name, frame in {**openings(), **headers()}.items():
        (folder / "wire").mkdir(exist_ok=True)
        (folder / "wire" / name).write_bytes(frame)
    (folder / "job.json").write_bytes(job().encode())
    (folder / "blob").write_bytes(seal_bytes(KEY, SECRET, label=LABEL))
    checkpoint = _checkpoint()
    (folder / "checkpoint").mkdir()
    write_checkpoint(folder / "checkpoint", checkpoint)
    _sealed_checkpoint(folder / "job", checkpoint)
    _sealed_set(folder)


def _checkpoint() -> Checkpoint:
    """Of a protected training that was stopped in the middle of an epoch."""
    with tempfile.TemporaryDirectory() as temporary:
        with dk.Runtime(SCHEME, None, seed=3) as runtime:
            model = protected(network(), runtime)
            stop = StopAfter(STOPPED_AT + 1, _interrupt)
            with suppress(KeyboardInterrupt):
                train(Path(temporary), model, runtime=runtime, every=0, progress=[stop])
        with Store(Path(temporary)) as store:
            latest = store.latest()
    assert latest is not None
    assert latest.step == STOPPED_AT
    return latest


def _sealed_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """As an enclave keeps it, and the receipt that its client keeps."""
    folder.mkdir()
    receipts: list[Receipt] = []
    SealedStore(folder, KEY, job=JOB, receipt=receipts.append).save(checkpoint)
    (folder / "receipts.json").write_bytes(dump(receipts[0].words()))


def _interrupt() -> None:
    raise KeyboardInterrupt


def _sealed_set(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        images, labels = seven()
        np.savez(Path(temporary) / "seven.npz", x=images, y=labels)
        data = read_dataset(str(Path(temporary) / "seven.npz"), seed=0)
        seal_dataset(data, Destination(folder=folder / "sealed", key=folder / "sealed.key"), progress=lambda more: None)


def main() -> None:
    folder = FIXTURES / dk.__version__
    if folder.exists():
        sys.exit(f"{folder} is there already, and what a release wrote stays as it is. Raise the version first.")
    make(folder)


if __name__ == "__main__":
    main()
