"""The reader of CIFAR's pickles runs nothing, imports nothing, and lets no file choose how much memory it takes."""

import os
import pickle
import re
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from boundaries.house import ROOT, sources
from darknight.data import pickled
from darknight.data.files import StillFile
from darknight.data.pickled import PickledArray, read_pickle
from darknight.errors import DataError
from data import makers

MARKER = "somebody-was-here"


@pytest.fixture
def file(tmp_path):
    def write(content):
        (tmp_path / "batch").write_bytes(content)
        return StillFile(tmp_path / "batch")

    return write


# --- what it reads ----------------------------------------------------------------------------------------------------
def test_it_reads_what_pythons_own_reader_reads(file):
    x, y = makers.images(300, shape=(3, 32, 32)), [number % 10 for number in range(300)]
    content = makers.python2_pickle(makers.cifar_batch(x, y))
    expected = pickle.loads(content, encoding="bytes")
    found = read_pickle(file(content))
    assert found.keys() == expected.keys()
    assert all(found[key] == expected[key] for key in found if key != b"data")
    data = found[b"data"]
    assert isinstance(data, PickledArray)
    assert data.shape == (300, 3072)
    assert content[data.data.begin : data.data.begin + data.data.length] == x.tobytes()


@pytest.mark.parametrize("protocol", [3, 4])
def test_it_reads_what_a_newer_python_writes(file, protocol):
    x = makers.images(2).reshape(2, -1)
    content = pickle.dumps({"data": x, "labels": [3, 70000], "ok": (True, None, -5, 1 << 40)}, protocol)
    found = read_pickle(file(content))
    assert found["labels"] == [3, 70000]
    assert found["ok"] == (True, None, -5, 1 << 40)
    assert found["data"].shape == (2, 3072)
    begin, length = found["data"].data.begin, found["data"].data.length
    assert content[begin : begin + length] == x.tobytes()


# --- what it refuses --------------------------------------------------------------------------------------------------
class Calls:
    """Pickles as a call of `function` with `arguments`."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def nested(levels):
    """A list of two references to a list of two references to ...: 2^levels entries, if anybody looked at them all."""
    inside_out = b"".join(b"q" + bytes([level]) + b"h" + bytes([level]) + b"e" for level in range(levels))
    return b"\x80\x02" + b"](" * levels + b"]" + inside_out + b"q" + bytes([levels])


ARRAY = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
DTYPE = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
MALICIOUS = {
    **{f"system-{p}": pickle.dumps(Calls(os.system, f"touch {MARKER}"), p) for p in range(6)},
    **{f"system-in-a-batch-{p}": pickle.dumps({"data": Calls(os.system, f"touch {MARKER}")}, p) for p in range(6)},
    **{f"eval-{p}": pickle.dumps(Calls(eval, f"open({MARKER!r}, 'w')"), p) for p in range(6)},
    "open": pickle.dumps(Calls(open, MARKER, "w"), 2),
    "getattr": pickle.dumps(Calls(getattr, 1, "real"), 2),
    "numpy.load": b"\x80\x02cnumpy\nload\nU\x01x\x85R.",
    "numpy.fromfile": b"\x80\x02cnumpy\nfromfile\nU\x01x\x85R.",
    "a-name-of-numpy-with-dots": b"\x80\x04\x8c\x05numpy\x8c\x0bndarray.sum\x93)R.",
    "a-name-on-the-stack": b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x05touch\x85R.",
    "an-object-array": b"\x80\x02" + ARRAY + b"(K\x01K\x02\x85cnumpy\ndtype\nU\x02O8K\x00K\x01\x87R\x89]tb.",
    "an-array-of-a-subclass": b"\x80\x02cnumpy.core.multiarray\n_reconstruct\ncnumpy\nmatrix\nK\x00\x85U\x01b\x87R.",
    "ndarray-called": b"\x80\x02cnumpy\nndarray\nK\x05\x85R.",
    "dtype-of-an-expression": b"\x80\x02cnumpy\ndtype\nU\x0a10000000u1K\x00K\x01\x87R.",
    "new-object": b"\x80\x02cnumpy\nndarray\n)\x81.",
    "instance": b"\x80\x02(ios\nsystem\n.",
    "object": b"\x80\x02(cos\nsystem\nU\x01xo.",
    "extension": b"\x80\x02\x82\x01.",
    "persistent-id": b"\x80\x02Px\n.",
    "state-for-a-dictionary": b"\x80\x02}}b.",
    "array-built-twice": b"\x80\x02" + ARRAY + (b"(K\x01K\x02\x85" + DTYPE + b"\x89U\x02abtb") * 2 + b".",
    "list-of-itself": b"\x80\x02]q\x00h\x00a" + b"h\x00\x93.",
}
GREEDY = {
    "nested-as-a-name": nested(200) + b"h\xc8\x93.",
    "nested-as-a-call": nested(200) + b"h\xc8R.",
    "nested-as-a-state": nested(200) + b"h\xc8b.",
    "nested-as-a-key": nested(200) + b"}h\xc8h\xc8s.",
    "long-text": b"\x80\x02T\xff\xff\xff\x7fabc.",
    "negative-text": b"\x80\x02T\xff\xff\xff\xffabc.",
    "long-bytes": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 62) + b"abc.",
    "bytes-of-an-overflow": b"\x80\x04\x8e" + struct.pack("<Q", (1 << 64) - 1) + b"abc.",
    "long-unicode": b"\x80\x02X\xff\xff\xff\xffabc.",
    "long-name": b"\x80\x02c" + b"x" * 1_000_000 + b"\n",
    "large-array": b"\x80\x02" + ARRAY + b"(K\x01J\xff\xff\xff\x7fJ\xff\xff\xff\x7f\x86" + DTYPE + b"\x89U\x02abtb.",
    "array-of-nothing-times-much": b"\x80\x02" + ARRAY + b"(K\x01K\x00J\xff\xff\xff\x7f\x86" + DTYPE + b"\x89U\x00tb.",
    "large-integer": b"\x80\x02\x8b" + struct.pack("<i", 1 << 30) + b"abc.",
    "memo-without-end": b"\x80\x02N" + b"".join(b"r" + struct.pack("<I", at * 4001) for at in range(100_000)) + b".",
    "lists-without-end": b"\x80\x02" + b"]" * 100_000 + b".",
    "marks-without-end": b"\x80\x02" + b"(" * 100_000 + b".",
}
DAMAGED = {
    "nothing": b"",
    "no-end": b"\x80\x02N",
    "more-behind": b"\x80\x02N.N",
    "two-values": b"\x80\x02NN.",
    "an-open-mark": b"\x80\x02(N.",
    "no-value": b"\x80\x02.",
    "no-mark": b"\x80\x02t.",
    "a-value-below-the-mark": b"\x80\x02N(\x85.",
    "no-memo": b"\x80\x02h\x05.",
    "protocol-0": pickle.dumps([1], 0),
    "protocol-9": b"\x80\x09N.",
    "odd-items": b"\x80\x02}(Nu.",
    "append-to-none": b"\x80\x02NNa.",
    "numbers-as-keys": b"\x80\x02}K\x01Ns.",
    "bad-utf8": b"\x80\x02X\x01\x00\x00\x00\xff.",
    "wrong-size": b"\x80\x02"
    + ARRAY
    + b"(K\x01M\x00\x04\x85"
    + DTYPE
    + b"\x89T"
    + struct.pack("<i", 1025)
    + b"x" * 1025
    + b"tb.",
    "html": b"<!DOCTYPE html><html><body>404</body></html>",
}


@pytest.mark.parametrize("name", [*MALICIOUS, *DAMAGED])
def test_what_is_no_batch_is_refused_and_nothing_runs(file, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    modules = set(sys.modules)
    with pytest.raises(DataError, match=r"batch: .* nothing in it was run"):
        read_pickle(file({**MALICIOUS, **DAMAGED}[name]))
    assert not Path(MARKER).exists()
    assert set(sys.modules) == modules


def test_the_same_files_do_run_in_pythons_own_reader(tmp_path, monkeypatch):
    """Otherwise the test above would show nothing."""
    monkeypatch.chdir(tmp_path)
    pickle.loads(MALICIOUS["system-2"])
    assert Path(MARKER).exists()


@pytest.mark.parametrize("name", GREEDY)
def test_a_greedy_file_gets_little_memory(file, name, monkeypatch):
    monkeypatch.setattr(pickled, "_MOST_STEPS", 50_000)  # of objects at some 100 bytes each
    content = file(GREEDY[name])
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="batch: "):
            read_pickle(content)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 10 << 20


def test_a_nest_of_references_is_read_without_looking_at_them_all(file):
    assert len(read_pickle(file(nested(200) + b"."))) == 2


# --- and nobody else unpickles ----------------------------------------------------------------------------------------
def test_no_module_of_ours_imports_an_unpickler():
    banned = re.compile(
        r"^\s*(import|from)\s+(c?pickle|_pickle|cloudpickle|dill|shelve|marshal|joblib)\b", re.MULTILINE
    )
    assert banned.search("    from pickle import load")
    assert not [source.module for source in sources() if banned.search(source.text)]


def test_no_module_of_ours_loads_with_numpy_or_torch():
    """Both unpickle, unless they are told not to; the readers here do without."""
    text = {source.module: source.text for source in sources() if source.room == "data"}
    assert not [name for name, code in text.items() if re.search(r"\b(np|numpy|torch)\.(load|lib\.npyio)\b", code)]


@pytest.mark.parametrize(
    "code", ["import pickle\n", "from pickle import load\n", "import pickle as p\np.load(open('x', 'rb'))\n"]
)
def test_the_linter_refuses_pickle_in_the_package(code):
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--no-cache", "--stdin-filename", "src/darknight/data/other.py", "-"],
        input=code,
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 1
    assert "TID251" in done.stdout
