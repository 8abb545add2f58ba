"""The history: whole lines, torn lines, several writers, and what counts as worse."""

import fcntl
import json
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from darknight.bench.history import Line, append, changes, lines_of, new_line, smaller_is_better
from darknight.errors import DarKnightError

HERE = {"processor": "one", "cores": 2}


def line(machine=HERE, conditions="batch 3", **ratios):
    paths = {path.replace("__", "."): value for path, value in ratios.items()}
    return new_line(paths, dict.fromkeys(paths, conditions), machine=machine, program={"version": "1"})


def read(path):
    return lines_of(path.read_bytes())


@pytest.fixture
def path(tmp_path):
    return tmp_path / "bench.jsonl"


def test_what_is_appended_is_read_again(path):
    first, second = line(ceiling__a=1.5), line(ceiling__a=2.5)
    assert append(path, first) == []
    assert append(path, second) == [first]
    assert read(path) == [first, second]
    assert [json.loads(text)["ratios"] for text in path.read_text().splitlines()] == [
        {"ceiling.a": 1.5},
        {"ceiling.a": 2.5},
    ]


def test_a_torn_line_is_skipped_and_spoils_no_other(path):
    first, second = line(ceiling__a=1.5), line(ceiling__a=2.5)
    append(path, first)
    whole = path.read_bytes()
    for cut in range(1, len(whole) - 1, 7):
        path.write_bytes(whole + whole[:cut])
        assert append(path, second) == [first]
        assert read(path) == [first, second]


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "[]",
        "null",
        "\N{SNOWMAN}",
        '{"date": "", "machine": {}, "program": {}, "ratios": {"a": null}, "conditions": {}}',
        '{"date": "", "machine": {}, "program": {}, "ratios": {"a": NaN}, "conditions": {}}',
        '{"date": "", "machine": {}, "program": {}, "ratios": {"a": 0}, "conditions": {}}',
        '{"date": "", "machine": 3, "program": {}, "ratios": {}, "conditions": {}}',
    ],
)
def test_other_lines_are_no_runs(path, text):
    path.write_text(f"{text}\n", encoding="utf-8")
    assert read(path) == []


def test_several_writers_write_whole_lines(path):
    """Threads, each with a descriptor of its own: to the lock of a file they are as processes are."""

    def write(who):
        for count in range(1, 21):
            append(path, line(**{f"ceiling__w{who}": float(count)}, conditions="x" * 5000))

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(write, range(3)))
    found = read(path)
    assert len(found) == len(path.read_text().splitlines()) == 60
    for who in range(3):
        mine = [each.ratios[f"ceiling.w{who}"] for each in found if f"ceiling.w{who}" in each.ratios]
        assert mine == list(range(1, 21))


def test_a_writer_waits_for_the_other(path):
    append(path, line(ceiling__a=1.0))
    with path.open("rb") as other, ThreadPoolExecutor(1) as pool:
        fcntl.flock(other, fcntl.LOCK_EX)
        waiting = pool.submit(append, path, line(ceiling__a=2.0))
        with pytest.raises(TimeoutError):
            waiting.result(0.2)
        assert len(read(path)) == 1
        fcntl.flock(other, fcntl.LOCK_UN)
        assert len(waiting.result(60)) == 1
    assert len(read(path)) == 2


def test_a_full_disk_leaves_no_half_line(path, monkeypatch):
    append(path, line(ceiling__a=1.5))
    before = path.read_bytes()
    write = os.write

    def full(descriptor, content):
        if len(content) < 100:
            raise OSError(28, "No space left on device")
        return write(descriptor, content[: len(content) - 50])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(DarKnightError, match="No space left"):
        append(path, line(ceiling__a=2.5))
    assert path.read_bytes() == before


def test_a_folder_is_no_history(tmp_path):
    with pytest.raises(DarKnightError, match="cannot write"):
        append(tmp_path, line(ceiling__a=1.0))


# --- what is worse ----------------------------------------------------------------------------------------------------
def compared(now, *before, path="ceiling.a"):
    key = path.replace(".", "__")
    (change,) = changes(line(**{key: now}), [line(**{key: value}) for value in before])
    return change


@pytest.mark.parametrize(
    ("path", "last", "now", "regressed"),
    [
        ("ceiling.shm.train.vgg16", 2.0, 1.79, True),
        ("ceiling.shm.train.vgg16", 2.0, 1.81, False),
        ("ceiling.shm.train.vgg16", 2.0, 3.0, False),
        ("rival.crypten", 50.0, 44.0, True),
        ("overhead.paper.vgg16", 2.0, 2.21, True),
        ("overhead.paper.vgg16", 2.0, 2.19, False),
        ("memory.vgg16", 1.2, 1.0, False),
        ("kernels.encode_over_copy", 1.0, 1.2, True),
    ],
)
def test_ten_per_cent_in_the_wrong_direction(path, last, now, regressed):
    assert compared(now, last, path=path).regressed is regressed


def test_the_last_decides_and_the_best_is_shown():
    change = compared(1.0, 3.0, 1.05)
    assert (change.last, change.best, change.regressed) == (1.05, 3.0, False)
    assert compared(1.0, 1.5, 0.7, path="memory.a").best == 0.7


def test_a_first_run_is_no_regression():
    change = compared(1.0)
    assert (change.last, change.best, change.worse, change.regressed) == (None, None, None, False)


def test_other_machines_and_other_sizes_are_not_compared():
    before = [
        line(machine={"processor": "two", "cores": 2}, ceiling__a=9.0),
        line(conditions="batch 4", ceiling__a=9.0),
    ]
    (change,) = changes(line(ceiling__a=1.0), before)
    assert change.last is None
    (change,) = changes(line(ceiling__a=1.0), [*before, line(ceiling__a=9.0)])
    assert change.regressed


def test_every_kind_of_ratio_has_a_direction():
    assert [smaller_is_better(path) for path in ("ceiling.x", "rival.x", "overhead.x", "kernels.x", "memory.x")] == [
        False,
        False,
        True,
        True,
        True,
    ]


def test_a_line_says_when():
    assert Line(**line(ceiling__a=1.0).words()).date.endswith("+00:00")
