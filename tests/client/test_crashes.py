"""Whatever stops a sealing, and whenever: no folder that looks complete and is not, and nothing lost or left behind."""

import os
import resource
import signal
import sys

import numpy as np
import pytest

from client.sealed import sealed
from darknight.client.seal import Destination, open_with, seal_dataset, verify_sealed
from darknight.data import read_dataset
from darknight.errors import DarKnightError, UsageError

RECORDS, SIDE = 24, 300  # of 90 kB: five of them at a time


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("source") / "set.npz"
    x = np.random.default_rng(0).integers(0, 256, (RECORDS, SIDE, SIDE), dtype=np.uint8)
    np.savez(path, x=x, y=np.arange(RECORDS) % 3)
    return str(path)


@pytest.fixture
def to(tmp_path):
    return Destination(folder=tmp_path / "sealed", key=tmp_path / "sealed.key")


def names_in(folder):
    return {path.name for path in folder.iterdir()}


def verified(to):
    return verify_sealed(open_with(to.folder, to.key), progress=lambda more: None)


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("after", [0, 1, 4])
def test_a_sealing_that_is_stopped_leaves_nothing(source, to, after, kind):
    calls = []

    def progress(more):
        calls.append(more)
        if len(calls) > after:
            raise kind

    with pytest.raises(kind):
        seal_dataset(read_dataset(source, seed=0), to, progress=progress)
    assert not names_in(to.folder.parent)
    assert len(calls) == after + 1


def test_data_that_turn_out_bad_leave_nothing(tmp_path, to):
    x = np.zeros((RECORDS, SIDE, SIDE), dtype=np.float32)
    x[-1, 0, 0] = np.inf
    y = np.arange(RECORDS) % 3
    np.savez(tmp_path.parent / "bad.npz", x_train=x[:-1], y_train=y[:-1], x_test=x[-1:], y_test=y[-1:])
    with pytest.raises(DarKnightError, match="NaN or infinite"):
        sealed(str(tmp_path.parent / "bad.npz"), to.folder)
    assert not names_in(to.folder.parent)


def test_a_disk_that_is_full_leaves_nothing_and_says_so(source, to):
    """The system refuses to let a file grow beyond a limit, in the middle of the records."""
    data = read_dataset(source, seed=0)
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
        with pytest.raises(DarKnightError, match=r"cannot write .*sealed: File too large.*nothing was kept"):
            seal_dataset(data, to, progress=lambda more: None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert not names_in(to.folder.parent)


@pytest.mark.parametrize("name", ["sealed", "sealed.key"])
def test_what_appears_meanwhile_stays_and_nothing_else_is_left(source, to, name):
    def progress(more):
        (to.folder.parent / name).write_text("precious")

    with pytest.raises(DarKnightError, match=r"appeared while it was written|never overwritten"):
        seal_dataset(read_dataset(source, seed=0), to, progress=progress)
    assert names_in(to.folder.parent) == {name}
    assert (to.folder.parent / name).read_text() == "precious"


def test_two_sealings_to_one_place_do_not_meet(source, to):
    data = read_dataset(source, seed=0)

    def progress(more):
        with pytest.raises(UsageError, match="in use by another sealing"):
            seal_dataset(data, to, progress=lambda more: None)

    seal_dataset(data, to, progress=progress)
    verified(to)
    assert names_in(to.folder.parent) == {"sealed", "sealed.key"}


# --- kill -9 ----------------------------------------------------------------------------------------------------------
def killed(data, to, at):
    """Seal in a process that dies when it touches a name there for the `at`-th time. True: it was done before that."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    try:
        touched = 0

        def hook(event, arguments):
            nonlocal touched
            here = arguments and str(arguments[0]).startswith(str(to.folder.parent))
            if here and event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "os.listdir"):
                touched += 1
                if touched == at:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        seal_dataset(data, to, progress=lambda more: None)
        os._exit(0)
    finally:
        os._exit(1)


def test_killed_at_any_moment_it_is_there_whole_or_not_at_all(source, tmp_path, tally):
    data = read_dataset(source, seed=0)
    seen = {"killed": 0, "whole": 0, "a key alone": 0, "nothing": 0}
    at = 0
    while True:
        at += 1
        place = tmp_path / f"at-{at}"
        place.mkdir()
        to = Destination(folder=place / "sealed", key=place / "sealed.key")
        if killed(data, to, at):
            break
        seen["killed"] += 1
        if to.folder.exists():
            verified(to)
            seen["whole"] += 1
        elif to.key.exists():
            seen["a key alone"] += 1
            to.key.unlink()
        else:
            seen["nothing"] += 1
        if not to.folder.exists():  # what was left is no obstacle, and is gone afterwards
            seal_dataset(data, to, progress=lambda more: None)
            verified(to)
        assert names_in(place) == {"sealed", "sealed.key"}
    tally("sealing, kill -9", seen)
    assert seen["killed"] >= 8
    assert seen["whole"] >= 1
    assert seen["nothing"] >= 4
    assert seen["a key alone"] <= 3  # between the key and the folder's name: a key that opens nothing, and no data lost
