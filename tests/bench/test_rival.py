"""Rivals: the process that they run in, what is said where they are absent, and that only equal work is compared."""

import json
import math
import os
import re
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from darknight.bench import Contest, Cost, Rivals, measure_rivals, rival
from darknight.bench.processors import processor_seconds
from darknight.bench.rival_networks import CLASSES, SHAPE, digits, inference_network, training_network
from darknight.bench.rival_process import INSTALL, MissingError, RivalProcess, Turn
from darknight.errors import UsageError

RIVALS = os.environ.get("DARKNIGHT_RIVALS")
HERE = Path(sys.executable)  # has neither rival: they are no dependencies


@pytest.fixture
def program(tmp_path):
    """Runs a program that is given as text."""
    started = []

    def run(text, *arguments, patience=60.0, **settings):
        script = tmp_path / "program.py"
        script.write_text(text)
        words = tmp_path / "words"
        process = RivalProcess(HERE, str(script), arguments, words=words, settings=settings, patience=patience)
        started.append(process)
        return process

    yield run
    for process in started:
        process.close()


# --- the process ------------------------------------------------------------------------------------------------------
ANSWERS = """
import json, os, sys
print(json.dumps({"ready": f"one {sys.argv[1]} {os.environ['TWO']}"}), flush=True)
for turn, _ in enumerate(sys.stdin):
    print(json.dumps({"seconds": 0.5, "processor_seconds": 0.25, "result": [turn, 2.5]}), flush=True)
"""


def test_a_turn_for_every_line(program):
    process = program(ANSWERS, "argument", TWO="setting")
    assert process.ready() == "one argument setting"
    for turn in range(3):
        process.begin()
        assert process.finish() == Turn(seconds=0.5, processor_seconds=0.25, result=(turn, 2.5))


def test_our_packages_and_secrets_stay_here(program, monkeypatch):
    monkeypatch.setenv("DARKNIGHT_SECRET", "of this process")
    process = program(
        "import json, os, sys\n"
        "known = sorted(name for name in os.environ if 'SECRET' in name)\n"
        "print(json.dumps({'ready': json.dumps([known, sys.flags.isolated, os.getcwd() in sys.path])}))\n"
    )
    assert json.loads(process.ready()) == [[], 1, False]


def test_a_package_that_is_not_there_is_no_failure(program):
    process = program('print(\'{"missing": "No module named this"}\')')
    with pytest.raises(MissingError, match="No module named this"):
        process.ready()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("raise SystemExit('at last')", r"(?s)program: it ended\. Install .*It said, at last:\nat last"),
        ("print('hello')", "not JSON"),
        ("print('[1]')", "not a JSON object"),
        ("print('{\"seconds\": 1}')", "does not say that it is ready"),
        ("print('x' * (1 << 21))", "does not end"),
    ],
)
def test_a_bad_beginning(program, text, complaint):
    with pytest.raises(UsageError, match=complaint):
        program(text).ready()


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"seconds": 1.0, "processor_seconds": 1.0},
        {"seconds": 1.0, "processor_seconds": 1.0, "result": 3},
        {"seconds": "long", "processor_seconds": 1.0, "result": [1]},
        {"seconds": 0.0, "processor_seconds": 1.0, "result": [1]},
        {"seconds": 1.0, "processor_seconds": 1.0, "result": []},
        {"seconds": 1.0, "processor_seconds": 1.0, "result": [math.nan]},
    ],
)
def test_an_answer_that_is_none(program, answer):
    process = program(f"import sys\nprint('{{\"ready\": \"\"}}', flush=True)\ninput()\nprint('{json.dumps(answer)}')")
    process.ready()
    process.begin()
    with pytest.raises(UsageError, match="its answer"):
        process.finish()


def test_one_that_does_not_answer_is_given_up_and_ended(program):
    process = program("import time\ntime.sleep(600)", patience=0.2)
    begun = time.monotonic()
    with pytest.raises(UsageError, match="no answer in 0 s"):
        process.ready()
    process.close()
    assert time.monotonic() - begun < 30


def test_one_that_ended_takes_no_turn(program):
    process = program('print(\'{"ready": ""}\')')
    process.ready()
    process._process.wait(60)
    with pytest.raises(UsageError, match="it ended"):
        process.begin()


def test_an_interpreter_that_is_not_there(tmp_path):
    with pytest.raises(UsageError, match=r"(?s)no-python: No such file.*pip install .*crypten"):
        RivalProcess(tmp_path / "no-python", "script.py", [], words=tmp_path / "words")


# --- what is compared -------------------------------------------------------------------------------------------------
def test_networks_fit_the_data():
    images, labels = digits(3)
    assert images.shape == (3, *SHAPE)
    assert images.min() >= 0
    assert images.max() == 1
    assert labels.tolist() == [0, 1, 2]  # as scikit-learn has them
    for network in (training_network("average"), training_network("max"), inference_network()):
        assert network(images).shape == (3, CLASSES)


def test_settings_that_make_no_sense():
    with pytest.raises(UsageError, match="batch 0"):
        digits(0)
    with pytest.raises(UsageError, match="needs one of average, max"):
        training_network("median")
    with pytest.raises(UsageError, match="0 turns"):
        measure_rivals(None, times=0)


def turns(*results, seconds=(1.0,)):
    """Somebody who takes these seconds in turn and comes to these results."""
    given = [
        Turn(seconds=seconds[min(turn, len(seconds) - 1)], processor_seconds=2.0, result=result)
        for turn, result in enumerate(results)
    ]
    return iter(given).__next__


def compare(plain, ours, other, times=2):
    runs = {"plain": plain, "ours": ours}
    return rival._in_turns(runs, "other", other, times, lambda words: None, what="test")


def test_the_best_turn_counts_and_the_first_does_not():
    results = [(1.0,), (0.5,), (0.25,)]
    found = compare(turns(*results), turns(*results, seconds=(0.1, 3.0, 2.0)), turns(*results, seconds=(9.0, 5.0, 7.0)))
    assert [found[who].seconds for who in ("plain", "ours", "rival")] == [1.0, 2.0, 5.0]


@pytest.mark.parametrize("who", ["ours", "other"])
def test_a_time_for_something_else_does_not_count(who):
    right, wrong = [(1.0, -0.2), (0.5, 0.1)], [(1.0, -0.2), (0.5, 0.2)]
    with pytest.raises(UsageError, match=f"{who} does not come to the results"):
        compare(turns(*right), *(turns(*(wrong if name == who else right)) for name in ("ours", "other")), times=1)
    compare(turns(*right), turns(*right), turns((1.01, -0.2), (0.51, 0.1)), times=1)  # rounding is no difference


def test_a_step_is_a_step_of_gradient_descent():
    torch.manual_seed(0)
    images, labels = digits(5)
    targets = nn.functional.one_hot(labels, CLASSES).float()
    ours, theirs = training_network("max"), training_network("max")
    theirs.load_state_dict(ours.state_dict())
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(theirs(images), targets)
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(rival._step(ours, images, targets), loss.detach())


BUSY = """
import time
while time.process_time() < 0.5: pass
print('{"ready": ""}', flush=True)
input()
"""


def test_processors_of_workers_count(program):
    process = program(BUSY)
    process.ready()
    here = time.process_time()
    assert processor_seconds((process._process.pid,)) - here > 0.5
    assert processor_seconds(()) - here < 0.5


def contest(name, ours, theirs):
    costs = [Cost(seconds=seconds, processor_seconds=2 * seconds) for seconds in (1.0, ours)]
    other = None if theirs is None else Cost(seconds=theirs, processor_seconds=theirs)
    return Contest(network="", rival_name=name, plain=costs[0], ours=costs[1], rival=other, absent=None)


def test_the_least_ratio_is_the_one_that_is_told():
    training = {"average": contest("crypten", 4.0, 240.0), "max": contest("crypten", 5.0, 500.0)}
    found = Rivals(batch=3, times=1, threads=1, training=training, inference=contest("tenseal", 2.0, None))
    assert (found.crypten, found.tenseal) == (60.0, None)
    words = json.loads(json.dumps(found.words(), allow_nan=False))
    assert words["crypten"] == 60.0
    assert words["training"]["max"]["faster"] == 100.0
    assert words["training"]["max"]["thriftier"] == 50.0
    assert words["inference"]["tenseal"] is None


@pytest.mark.parametrize(("python", "why"), [(None, "no environment .* was named"), (HERE, "No module named")])
def test_without_rivals_the_rest_is_measured(python, why):
    found = measure_rivals(python, batch=6, times=1, poolings=("average",))
    assert found.crypten is None
    assert found.tenseal is None
    for entry in (found.training["average"], found.inference):
        assert 0 < entry.plain.seconds < entry.ours.seconds
        assert entry.plain.processor_seconds < entry.ours.processor_seconds
        assert entry.rival is None
        assert re.search(why, entry.absent)
        assert INSTALL in entry.absent
    json.dumps(found.words(), allow_nan=False)


@pytest.mark.skipif(RIVALS is None, reason="DARKNIGHT_RIVALS names no Python with CrypTen and TenSEAL")
def test_the_rivals_themselves():
    found = measure_rivals(Path(RIVALS), batch=6, times=1, poolings=("average", "max"))
    for entry in (*found.training.values(), found.inference):
        assert entry.absent is None
        assert entry.rival.seconds > entry.plain.seconds
        assert entry.faster > 1
    assert found.crypten == min(entry.faster for entry in found.training.values())
    assert found.tenseal > 100
