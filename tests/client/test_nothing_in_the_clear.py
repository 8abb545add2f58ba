"""Who stores a sealed set finds nothing of it: no bytes, no names, no keys, and nothing that goes with the data."""

import numpy as np
import pytest

from client.sealed import sealed
from darknight.client.seal import Destination, key_beside, open_with, seal_dataset
from darknight.data import read_dataset
from darknight.trust.key_file import read_key_file
from trust.weakened import NO_INDEX, weakened

COUNT, SIDE = 400, 20
NAMES = ("malignant-melanoma", "benign-naevus", "seborrhoeic-keratosis")
WINDOW = 8  # bytes: 2,000 of such pieces are found by chance in three MB once in three thousand million runs


@pytest.fixture
def made(tmp_path):
    """Images as patients have them: smooth, so that neighbouring bytes go together, with classes that have names."""
    x = np.random.default_rng(0).normal(0, 1, (COUNT, SIDE, SIDE)).cumsum(axis=1).cumsum(axis=2)
    x = ((x - x.min()) / (x.max() - x.min()) * 255).astype(np.uint8)
    y = np.arange(COUNT) % len(NAMES)
    lines = [",".join([*map(str, row), NAMES[label]]) for row, label in zip(x.reshape(COUNT, -1), y, strict=True)]
    table = tmp_path / "patients.csv"
    table.write_text("\n".join([",".join([*(f"p{at}" for at in range(SIDE * SIDE)), "label"]), *lines]) + "\n")
    np.savez(tmp_path / "patients.npz", x=x, y=y)
    return tmp_path, x, y


def content_of(folder):
    return b"".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())


def windows(raw, step=7):
    """Pieces of `raw` that have something in them."""
    found = {raw[at : at + WINDOW] for at in range(0, len(raw) - WINDOW, step)}
    return {piece for piece in found if len(set(piece)) >= 3}


def needles(x, y, key):
    """What may not be found: pixels in each form that the data room has for them, labels, names, the key."""
    pixels = [x.astype(dtype).tobytes() for dtype in (np.uint8, np.float32, np.float64)]
    labels = [np.asarray(y).astype(dtype).tobytes() for dtype in (np.uint8, np.int32, np.int64)]
    return {
        "pixels": set().union(*(windows(raw, step=1001 + 2 * at) for at, raw in enumerate(pixels))),
        "labels": {raw[24:64] for raw in labels},
        "names": {name.encode() for name in (*NAMES, "patients")},
        "key": {key.raw[:WINDOW], key.raw.hex().encode()},
    }


def found_in(content, wanted):
    return {kind for kind, pieces in wanted.items() if any(piece in content for piece in pieces)}


@pytest.mark.parametrize("form", ["csv", "npz"])
def test_neither_data_nor_labels_nor_names_nor_keys_are_there(made, form):
    folder, x, y = made
    result = sealed(str(folder / f"patients.{form}"), folder / "sealed")
    wanted = needles(x, y, result.key_file.key)
    assert found_in(content_of(result.folder), wanted) == set()
    # The scan can find them: pixels and labels in the files they came from, and everything in the records and the head
    # before they are sealed. (Of a CSV file the numbers are text.)
    assert "pixels" in found_in((folder / "patients.npz").read_bytes(), wanted)
    assert found_in(plain_content(result) + result.key_file.key.raw, wanted) >= {"pixels", "key"}
    assert "names" in found_in(
        plain_content(result) if form == "csv" else (folder / "patients.csv").read_bytes(), wanted
    )
    assert found_in(result.key.read_bytes(), wanted) == {"key"}


def plain_content(result):
    """The head and the records as they are before sealing."""
    records = open_with(result.folder, result.key)
    return records.head + records.read(np.arange(len(records))).tobytes()


def test_nor_while_it_is_written(made):
    folder, x, y = made
    data = read_dataset(str(folder / "patients.csv"), seed=0)
    place = folder / "work"
    place.mkdir()
    seen = []
    to = Destination(folder=place / "sealed", key=key_beside(place / "sealed"))
    seal_dataset(data, to, progress=lambda more: seen.append(content_of(place)))
    wanted = needles(x, y, read_key_file(to.key).key)
    assert seen
    assert all(len(content) > 100_000 for content in seen[1:])
    assert found_in(b"".join(seen), wanted) == set()


def bits(array):
    return np.unpackbits(array, axis=1).astype(np.float64)


def strongest(one, other):
    """The largest correlation over records between any bit of one and the same bit of the other."""
    one, other = (bits - bits.mean(axis=0) for bits in (one, other))
    size = np.sqrt((one**2).sum(axis=0) * (other**2).sum(axis=0))
    useful = size > 0
    return float(np.abs((one * other).sum(axis=0)[useful] / size[useful]).max())


def test_nothing_in_the_sealed_records_goes_with_the_data(made):
    """No bit of a sealed record tells the bit of the data in its place: a scan for bytes would not notice that."""
    folder, x, _ = made
    chance = 6.5 / np.sqrt(COUNT)  # of 3,200 correlations of 400 pairs, once in ten million runs

    def measured(name):
        result = sealed(str(folder / "patients.npz"), folder / name)
        content = np.frombuffer((result.folder / "records").read_bytes(), dtype=np.uint8).reshape(COUNT, -1)
        plain = np.frombuffer(plain_content(result)[-COUNT * SIDE * SIDE :], dtype=np.uint8).reshape(COUNT, -1)
        assert np.array_equal(np.sort(plain, axis=0), np.sort(x.reshape(COUNT, -1), axis=0))
        return strongest(bits(content[:, : plain.shape[1]]), bits(plain))

    assert measured("sealed") < chance
    with weakened(NO_INDEX):  # the same key stream for every record: no byte of the data is there, and all of it is
        assert measured("weak") > 0.99
