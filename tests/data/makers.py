"""Small sets in every format, written as the published ones are, and what they must be read as."""

import gzip
import io
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from darknight.data import read_dataset


@dataclass(frozen=True)
class Made:
    """What was written: where, its name for read_dataset, and the images as (example, channel, height, width)."""

    path: Path
    source: str
    train_x: np.ndarray
    train_y: list[int]
    test_x: np.ndarray
    test_y: list[int]


def images(count, *, seed=0, shape=(3, 32, 32)):
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)


def labels(count, classes=10):
    return [number % classes for number in range(count)]


# --- CIFAR ------------------------------------------------------------------------------------------------------------
def python2_pickle(entries):
    """A dictionary as Python 2's cPickle wrote CIFAR's files, protocol 2: texts, lists of texts or integers, arrays."""
    memo = iter(range(1, 1 << 20))

    def put():
        number = next(memo)
        return b"q" + bytes([number]) if number < 256 else b"r" + struct.pack("<I", number)

    def text(value):
        if len(value) < 256:
            return b"U" + bytes([len(value)]) + value
        return b"T" + struct.pack("<i", len(value)) + value

    def integer(value):
        if 0 <= value < 256:
            return b"K" + bytes([value])
        return b"M" + struct.pack("<H", value) if 0 <= value < 65536 else b"J" + struct.pack("<i", value)

    def anything(value):
        if isinstance(value, bytes):
            return text(value) + put()
        if isinstance(value, int):
            return integer(value)
        if isinstance(value, list):
            head = b"]" + put() + b"("
            return head + b"".join(map(anything, value)) + b"e"
        return array(value)

    def array(value):
        order = "F" if value.flags.f_contiguous and not value.flags.c_contiguous else "C"
        made = b"cnumpy.core.multiarray\n_reconstruct\n" + put() + b"cnumpy\nndarray\n" + put()
        made += integer(0) + b"\x85" + text(b"b") + b"\x87R" + put()
        dtype = b"cnumpy\ndtype\n" + put() + text(b"u1") + integer(0) + integer(1) + b"\x87R" + put()
        dtype += b"(" + integer(3) + text(b"|") + b"NNN" + integer(-1) + integer(-1) + integer(0) + b"tb"
        shape = integer(value.shape[0]) + integer(value.shape[1]) + b"\x86"
        state = b"(" + integer(1) + shape + dtype + (b"\x88" if order == "F" else b"\x89")
        return made + state + text(value.tobytes(order)) + b"tb"

    body = b"\x80\x02}" + put() + b"("
    for key, value in entries.items():
        body += anything(key) + anything(value)
    return body + b"u."


CIFAR10_NAMES = b"airplane automobile bird cat deer dog frog horse ship truck".split()
CIFAR100_NAMES = [f"fine {number}".encode() for number in range(100)]


def cifar_batch(x, y, *, hundred=False):
    entries = {b"data": x.reshape(len(x), -1), b"filenames": [b"image_%d.png" % number for number in range(len(x))]}
    if hundred:
        return entries | {b"fine_labels": y, b"coarse_labels": [label // 5 for label in y]}
    return entries | {b"batch_label": b"training batch", b"labels": y}


def cifar10_python(folder, per_batch=2):
    folder.mkdir(parents=True)
    x, y = images(6 * per_batch), labels(6 * per_batch)
    for number, name in enumerate([*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]):
        here = slice(number * per_batch, (number + 1) * per_batch)
        (folder / name).write_bytes(python2_pickle(cifar_batch(x[here], y[here])))
    meta = {b"num_cases_per_batch": 10000, b"label_names": CIFAR10_NAMES, b"num_vis": 3072}
    (folder / "batches.meta").write_bytes(python2_pickle(meta))
    cut = 5 * per_batch
    return Made(folder, f"cifar10:{folder}", x[:cut], y[:cut], x[cut:], y[cut:])


def cifar100_python(folder, train=7, test=3):
    folder.mkdir(parents=True)
    x, y = images(train + test), labels(train + test, 100)
    y[0] = 99
    (folder / "train").write_bytes(python2_pickle(cifar_batch(x[:train], y[:train], hundred=True)))
    (folder / "test").write_bytes(python2_pickle(cifar_batch(x[train:], y[train:], hundred=True)))
    (folder / "meta").write_bytes(python2_pickle({b"fine_label_names": CIFAR100_NAMES, b"coarse_label_names": [b"x"]}))
    return Made(folder, f"cifar100:{folder}", x[:train], y[:train], x[train:], y[train:])


def cifar10_binary(folder, per_batch=2):
    folder.mkdir(parents=True)
    x, y = images(6 * per_batch), labels(6 * per_batch)
    for number, name in enumerate([*(f"data_batch_{n}.bin" for n in range(1, 6)), "test_batch.bin"]):
        here = range(number * per_batch, (number + 1) * per_batch)
        (folder / name).write_bytes(b"".join(bytes([y[at]]) + x[at].tobytes() for at in here))
    (folder / "batches.meta.txt").write_bytes(b"\n".join(CIFAR10_NAMES) + b"\n\n")
    cut = 5 * per_batch
    return Made(folder, f"cifar10:{folder}", x[:cut], y[:cut], x[cut:], y[cut:])


def cifar100_binary(folder, train=7, test=3):
    folder.mkdir(parents=True)
    x, y = images(train + test), labels(train + test, 100)
    y[0] = 99
    records = [bytes([label // 5, label]) + image.tobytes() for image, label in zip(x, y, strict=True)]
    (folder / "train.bin").write_bytes(b"".join(records[:train]))
    (folder / "test.bin").write_bytes(b"".join(records[train:]))
    (folder / "fine_label_names.txt").write_bytes(b"\n".join(CIFAR100_NAMES) + b"\n")
    return Made(folder, f"cifar100:{folder}", x[:train], y[:train], x[train:], y[train:])


# --- IDX --------------------------------------------------------------------------------------------------------------
def idx(array):
    array = np.asarray(array, dtype=np.uint8)
    return bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def mnist(folder, *, packed=False, train=12, test=5, name="mnist"):
    folder.mkdir(parents=True)
    x, y = images(train + test, shape=(1, 28, 28)), labels(train + test)
    for prefix, here in (("train", slice(0, train)), ("t10k", slice(train, None))):
        for rest, array in (("images-idx3-ubyte", x[here, 0]), ("labels-idx1-ubyte", y[here])):
            path = folder / f"{prefix}-{rest}{'.gz' * packed}"
            path.write_bytes(gzip.compress(idx(array), mtime=0) if packed else idx(array))
    return Made(folder, f"{name}:{folder}", x[:train], y[:train], x[train:], y[train:])


def mnist_packed(folder):
    return mnist(folder, packed=True)


# --- the others -------------------------------------------------------------------------------------------------------
def npz(path, *, packed=False, train=10, test=4):
    path.parent.mkdir(parents=True, exist_ok=True)
    path = path.with_suffix(".npz")
    x, y = images(train + test, shape=(3, 8, 8)), labels(train + test)
    save = np.savez_compressed if packed else np.savez
    last = x.transpose(0, 2, 3, 1)
    save(path, train_x=last[:train].copy(), train_y=y[:train], test_x=last[train:].copy(), test_y=y[train:])
    return Made(path, f"npz:{path}", x[:train], y[:train], x[train:], y[train:])


def npz_packed(path):
    return npz(path, packed=True)


def npz_of(path, *, packed=False, **members):
    """An archive of any arrays, or of raw bytes in the place of a member."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED) as archive:
        for name, value in members.items():
            if not isinstance(value, bytes):
                buffer = io.BytesIO()
                np.lib.format.write_array(buffer, np.asanyarray(value), allow_pickle=True)
                value = buffer.getvalue()
            archive.writestr(f"{name}.npy", value)
    return path


def pictures(folder, *, per_class=2, size=(40, 30), ending="png"):
    from PIL import Image

    for part in ("train", "val"):
        for number, name in enumerate(("cats", "dogs")):
            (folder / part / name).mkdir(parents=True)
            for at in range(per_class):
                pixels = images(1, seed=10 * number + at, shape=(size[1], size[0], 3))[0]
                Image.fromarray(pixels).save(folder / part / name / f"{at}.{ending}")
    y = [0] * per_class + [1] * per_class
    return Made(folder, f"folder:{folder}", np.empty(0), y, np.empty(0), y)


def jpegs(folder):
    return pictures(folder, ending="jpeg")


COLOURS = ("red", "green", "blue")


def table(path, rows=12):
    path.parent.mkdir(parents=True, exist_ok=True)
    path = path.with_suffix(".csv")
    x = np.random.default_rng(0).normal(5, 3, (rows, 3)).round(4)
    y = labels(rows, 3)
    lines = [f"{a},{b},{COLOURS[label]},{c}" for (a, b, c), label in zip(x, y, strict=True)]
    path.write_text("\n".join(["width,height,class,age", *lines]) + "\n")
    return Made(path, f"csv:{path}", x, y, np.empty(0), [])


MAKERS = {
    "cifar10-python": cifar10_python,
    "cifar100-python": cifar100_python,
    "cifar10-binary": cifar10_binary,
    "cifar100-binary": cifar100_binary,
    "mnist": mnist,
    "mnist-gz": mnist_packed,
    "npz": npz,
    "npz-compressed": npz_packed,
    "png": pictures,
    "jpeg": jpegs,
    "csv": table,
}


def read_all(source, **settings):
    """The dataset, and every example of both parts."""
    data = read_dataset(source, seed=0, **settings)
    return data, *(part.examples(torch.arange(len(part))) for part in (data.train, data.test))


def normalised(x, like):
    """What bytes (example, channel, height, width) must become, when `like` are the training ones."""
    mean = like.mean(axis=(0, 2, 3), keepdims=True, dtype=np.float64)
    std = like.std(axis=(0, 2, 3), keepdims=True, dtype=np.float64)
    return torch.from_numpy((x - mean) / std).float()
