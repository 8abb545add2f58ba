"""Archives of NumPy: which array is which, where the channels are, and what is refused."""

import io
import zipfile

import numpy as np
import pytest
import torch

from darknight.data import files, read_dataset
from darknight.data.source import InMemory, Records
from darknight.errors import DataError
from data import makers


@pytest.fixture(params=[False, True], ids=["stored", "compressed"])
def packed(request):
    return request.param


@pytest.fixture
def write(tmp_path, packed):
    return lambda **members: str(makers.npz_of(tmp_path / "set.npz", packed=packed, **members))


X, Y = makers.images(10, shape=(8, 9, 3)), np.arange(10) % 2


def test_images_and_labels_are_those_that_were_written(tmp_path, packed):
    made = makers.npz(tmp_path / "set", packed=packed)
    data, train, test = makers.read_all(made.source)
    assert torch.allclose(train, makers.normalised(made.train_x, made.train_x), atol=1e-5)
    assert torch.allclose(test, makers.normalised(made.test_x, made.train_x), atol=1e-5)
    assert data.train.labels.tolist() == made.train_y
    assert data.test.labels.tolist() == made.test_y
    assert train.is_contiguous()
    assert isinstance(data.train.source, InMemory if packed else Records)
    assert (data.name, data.shape, data.classes) == ("set.npz", (3, 8, 8), 10)


@pytest.mark.parametrize(
    "names",
    ["x y", "X Y", "images labels", "data target", "features targets", "train_x train_y test_x test_y",
     "x_train y_train x_test y_test", "train_images train_labels test_images test_labels"],
)  # fmt: skip
def test_arrays_are_found_by_their_usual_names(write, names):
    first, *rest = (names.split()[:2], names.split()[2:])
    path = write(**dict(zip(first, (X, Y), strict=True)), **dict(zip(*rest, (X[:4], Y[:4]), strict=False)))
    data = read_dataset(path, seed=0)
    assert (len(data.train), len(data.test)) == ((10, 4) if rest[0] else (8, 2))
    assert data.shape == (3, 8, 9)


def test_other_arrays_are_left_alone(write):
    path = write(x=X, y=Y, names=np.array(["a"]), objects=np.array([{}], dtype=object), val_images=X)
    assert len(read_dataset(path, seed=0).train) == 8


@pytest.mark.parametrize(
    "members",
    [{}, {"x": X}, {"y": Y}, {"x": X, "train_y": Y}, {"train_x": X, "train_y": Y, "test_x": X},
     {"x": X, "y": Y, "train_x": X, "train_y": Y}, {"a": X, "b": Y}],
)  # fmt: skip
def test_arrays_that_do_not_pair_are_refused_with_the_names_that_are_needed(write, members):
    with pytest.raises(DataError, match=r"set.npz: holds .* Needs x.npy and y.npy, or train_x"):
        read_dataset(write(**members), seed=0)


def test_two_arrays_for_one_thing_are_refused(write):
    with pytest.raises(DataError, match=r"'images.npy' mean the same"):
        read_dataset(write(x=X, y=Y, images=X), seed=0)


@pytest.mark.parametrize(
    ("shape", "becomes"),
    [((10, 7), (7,)), ((10, 8, 9), (1, 8, 9)), ((10, 8, 9, 3), (3, 8, 9)), ((10, 3, 8, 9), (3, 8, 9)),
     ((10, 8, 9, 1), (1, 8, 9)), ((10, 1, 8, 9), (1, 8, 9)), ((10, 4, 8, 9), (4, 8, 9))],
)  # fmt: skip
@pytest.mark.parametrize("dtype", ["u1", "f2", "<f4", ">f4", "<f8", ">f8", "i1", "<i2", ">u4", "<i8"])
def test_axes_and_dtypes(write, shape, becomes, dtype):
    values = np.random.default_rng(0).integers(0, 100, shape).astype(dtype)
    data, train, test = makers.read_all(write(x=values, y=Y), test_share=0.3)
    assert data.shape == becomes
    first = values if len(shape) != 4 or shape[1] in (1, 3, 4) else values.transpose(0, 3, 1, 2)
    first = first[:, None] if len(shape) == 3 else first
    axes = tuple(axis for axis in range(first.ndim) if axis != 1)
    chosen, kept = (part.chosen.numpy() for part in (data.train, data.test))
    wide = first.astype(np.float64)
    mean, std = (f(wide[chosen], axis=axes, keepdims=True) for f in (np.mean, np.std))
    for found, numbers in ((train, chosen), (test, kept)):
        assert torch.allclose(found, torch.from_numpy((wide[numbers] - mean) / std).float(), atol=2e-5)


@pytest.mark.parametrize(
    ("shape", "complaint"),
    [
        ((10, 3, 8, 3), "first or last"),
        ((10, 8, 8, 8), "1, 3 or 4 channels"),
        ((10,), "Needs"),
        ((10, 1, 2, 3, 4), "Needs"),
    ],
)
def test_axes_that_say_nothing_are_refused(write, shape, complaint):
    with pytest.raises(DataError, match=f"'x.npy': shape .*{complaint}"):
        read_dataset(write(x=np.zeros(shape, dtype=np.uint8), y=Y), seed=0)


def test_fortran_order_is_the_same_array(write):
    again, fortran = (makers.read_all(write(x=x, y=Y))[1] for x in (X, np.asfortranarray(X)))
    assert torch.equal(again, fortran)


@pytest.mark.parametrize(
    ("y", "complaint"),
    [(Y[:9], r"labels of shape \(9,\)"), (Y.astype(float), "dtype float64"), (np.eye(10, dtype=int), r"\(10, 10\)"),
     (Y - 1, "outside 0"), (Y + (1 << 40), "outside 0"), (np.full(10, 1 << 63, dtype=np.uint64), "outside 0")],
)  # fmt: skip
def test_labels_that_are_none_are_refused(write, y, complaint):
    with pytest.raises(DataError, match=f"'y.npy': .*{complaint}"):
        read_dataset(write(x=X, y=y), seed=0)


def test_labels_in_a_column_are_labels(write):
    assert read_dataset(write(x=X, y=Y[:, None]), seed=0).train.labels.shape == (8,)


@pytest.mark.parametrize("x", [np.array([{}] * 10, dtype=object), np.array(["a"] * 10), np.zeros(10, dtype="c16")])
def test_objects_and_texts_are_refused(write, x):
    with pytest.raises(DataError, match=r"'x.npy': (an array of dtype|a header that)"):
        read_dataset(write(x=x.reshape(10, 1), y=Y), seed=0)


def header(text, *, version=1):
    data = text.encode()
    return b"\x93NUMPY" + bytes((version, 0)) + len(data).to_bytes(2 if version == 1 else 4, "little") + data


GOOD = "{'descr': '|u1', 'fortran_order': False, 'shape': (10, 4), }\n"


@pytest.mark.parametrize(
    "text",
    [GOOD, GOOD.replace(", }", "}"), GOOD.replace("10, 4", "10L, 4L"), GOOD.replace(" ", ""),
     "{'shape': (10, 4), 'fortran_order': False, 'descr': '|u1'}"],
)  # fmt: skip
@pytest.mark.parametrize("version", [1, 2, 3])
def test_headers_as_others_write_them(write, text, version):
    path = write(x=header(text, version=version) + bytes(range(40)), y=Y)
    assert read_dataset(path, seed=0).shape == (4,)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x93NUMPY",
        header(GOOD, version=4) + bytes(40),
        header(GOOD)[:20],
        header(GOOD) + bytes(39),
        header(GOOD) + bytes(41),
        header(GOOD.replace("10", "-10")) + bytes(40),
        header(GOOD.replace("10, 4", "10, 4, 99999999999999999999")) + bytes(40),
        header(GOOD.replace("10, 4", "10,, 4")) + bytes(40),
        header(GOOD.replace("(10, 4)", "__import__('os').system('touch here')")) + bytes(40),
        header(GOOD.replace("'|u1'", "[('a', '|O')]")) + bytes(40),
        header(GOOD.replace("|u1", "|O")) + bytes(40),
        header(GOOD.replace("'fortran_order': False", "'shape': (1,)")) + bytes(40),
        header("(" * 4000) + bytes(40),
        header(GOOD + " " * 5000) + bytes(40),
        b"\x93NUMPY\x02\0\xff\xff\xff\xff" + bytes(40),
    ],
)
def test_headers_that_are_none_are_refused(write, content):
    with pytest.raises(DataError, match=r"set.npz, 'x.npy': "):
        read_dataset(write(x=content, y=Y), seed=0)


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_unusual_compression_is_refused(tmp_path, method):
    path = makers.npz_of(tmp_path / "set.npz", y=Y)
    buffer = io.BytesIO()
    np.save(buffer, X)
    with zipfile.ZipFile(path, "a", method) as archive:
        archive.writestr("x.npy", buffer.getvalue())
    with pytest.raises(DataError, match="compressed in an unusual way"):
        read_dataset(str(path), seed=0)


def test_a_changed_byte_is_found_by_the_checksum(tmp_path, packed):
    made = makers.npz(tmp_path / "set", packed=packed, train=100)
    content = bytearray(made.path.read_bytes())
    content[15_000] ^= 1  # within the pixels of train_x, far from its header
    made.path.write_bytes(content)
    with pytest.raises(DataError, match=r"set.npz, 'train_x.npy': is damaged"):
        read_dataset(made.source, seed=0)


def test_what_is_compressed_must_fit_in_memory_and_the_error_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MEMORY_LIMIT", 1000)
    made = makers.npz(tmp_path / "set", packed=True)
    with pytest.raises(DataError, match=r"at most 1000 are. Save it with numpy.savez, uncompressed"):
        read_dataset(made.source, seed=0)


def test_a_size_that_cannot_be_is_refused_before_any_room_is_made(tmp_path):
    """1 MiB of zeros in 1 KiB is possible; 1 GiB in 1 KiB is a lie."""
    packed = io.BytesIO()
    text = GOOD.replace("10, 4", f"10, {1 << 30}")
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", header(text) + bytes(1 << 20))
        archive.writestr("y.npy", header(text))
    content = bytearray(packed.getvalue())
    for mark, at in ((b"PK\x03\x04", 22), (b"PK\x01\x02", 24)):  # the uncompressed size in both headers
        place = content.index(mark) + at
        content[place : place + 4] = (len(header(text)) + 10 * (1 << 30) & 0xFFFFFFFF).to_bytes(4, "little")
    (tmp_path / "set.npz").write_bytes(content)
    with pytest.raises(DataError, match=r"set.npz"):
        read_dataset(str(tmp_path / "set.npz"), seed=0)


def test_something_else_is_refused(tmp_path):
    (tmp_path / "set.npz").write_bytes(b"hello")
    with pytest.raises(DataError, match=r"set.npz: is damaged or of another kind"):
        read_dataset(str(tmp_path / "set.npz"), seed=0)


def test_the_slice_of_cifar10(shared):
    path = shared / "data" / "cifar10_small.npz"
    if not path.is_file():
        pytest.skip("DARKNIGHT_SHARED has no data/cifar10_small.npz")
    data = read_dataset(str(path), seed=0)
    assert (len(data.train), len(data.test), data.shape, data.classes) == (10_000, 2_000, (3, 32, 32), 10)
    x = data.train.examples(torch.arange(0, 10_000, 100))
    with np.load(path, allow_pickle=False) as arrays:
        first = arrays["x_train"][::100].transpose(0, 3, 1, 2) / 255
    mean, std = (np.array(values).reshape(3, 1, 1) for values in (data.normalisation.mean, data.normalisation.std))
    assert torch.allclose(x, torch.from_numpy((first - mean) / std).float(), atol=1e-5)
    # The whole set's published figures, within what a slice allows.
    assert data.normalisation.mean == pytest.approx((0.4914, 0.4822, 0.4465), abs=0.01)
    assert data.normalisation.std == pytest.approx((0.2470, 0.2435, 0.2616), abs=0.01)
