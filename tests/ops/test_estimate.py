"""What a task is said to take is never less than what it takes, and not many times more."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from darknight.errors import OpError
from darknight.ops import REGISTRY, Conv, ConvTranspose, Linear, estimate, field
from darknight.ops.estimate import Reach, task_bytes
from darknight.ops.strategy import STRATEGIES
from darknight.types import BackwardTask, ForwardTask, Pass, Weights
from darknight.worker import Executor
from darknight.worker.budget import Budget
from darknight.worker.engine import LocalEngine

PRIME = 2**28 - 57

pytestmark = pytest.mark.usefixtures("one_thread")

CASES = {
    "linear": (Linear(), (64, 512), (300, 512)),
    "linear, large weights": (Linear(), (4, 512), (512, 512)),
    "linear, in blocks": (Linear(), (3, 2500), (3500, 2500)),
    "linear, more axes": (Linear(), (8, 20, 128), (128, 128)),
    "conv": (Conv.make((3, 3), padding=1), (8, 16, 20, 20), (24, 16, 3, 3)),
    "conv, large kernel, stride": (Conv.make((5, 5), padding=2, stride=2), (8, 16, 20, 20), (24, 16, 5, 5)),
    "conv, one by one": (Conv.make((1, 1)), (8, 32, 20, 20), (32, 32, 1, 1)),
    "conv, one by one, stride": (Conv.make((1, 1), stride=2), (8, 32, 20, 20), (32, 32, 1, 1)),
    "conv, dilation": (Conv.make((3, 3), padding=2, dilation=2), (8, 16, 20, 20), (24, 16, 3, 3)),
    "conv, depthwise": (Conv.make((3, 3), padding=1, groups=32), (8, 32, 20, 20), (32, 1, 3, 3)),
    "conv, groups": (Conv.make((3, 3), padding=1, groups=4), (8, 32, 20, 20), (32, 8, 3, 3)),
    "conv, one axis": (Conv.make((9,), padding=4), (8, 16, 300), (32, 16, 9)),
    "conv, three axes": (Conv.make((3, 3, 3), padding=1), (2, 8, 12, 12, 12), (8, 8, 3, 3, 3)),
    "conv, reflect": (Conv.make((5, 5), padding=2, padding_mode="reflect"), (8, 8, 20, 20), (16, 8, 5, 5)),
    "conv, replicate": (Conv.make((3, 3), padding=4, padding_mode="replicate"), (8, 8, 20, 20), (16, 8, 3, 3)),
    "conv, circular": (Conv.make((5, 5), padding=2, padding_mode="circular"), (8, 8, 20, 20), (16, 8, 5, 5)),
    "conv, same": (Conv.make((4, 4), padding="same"), (8, 8, 20, 20), (16, 8, 4, 4)),
    "transposed": (ConvTranspose.make((4, 4), stride=2, padding=1), (8, 32, 10, 10), (32, 16, 4, 4)),
    "transposed, groups": (ConvTranspose.make((3, 3), padding=1, groups=2), (8, 32, 16, 16), (32, 16, 3, 3)),
    "transposed, one axis": (ConvTranspose.make((9,), stride=3), (8, 32, 100), (32, 16, 9)),
    "transposed, three axes": (ConvTranspose.make((3, 3, 3), stride=2), (2, 8, 6, 6, 6), (8, 8, 3, 3, 3)),
}


def peak_of(work):
    """The most bytes that torch held at once for `work`, beyond what it held before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = work()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    assert peak >= sum(tensor.nbytes for tensor in result.tensors.values())  # the profiler saw at least the result
    return peak


def tasks_of(op, x_shape, w_shape, prime):
    generator = torch.Generator().manual_seed(0)

    def share(*shape):
        if prime is None:
            return torch.randn(shape, generator=generator)
        return torch.randint(0, prime, shape, generator=generator, dtype=torch.int32)

    y_shape = op.output_shape(x_shape, w_shape)
    same = {"layer": "a", "call": 1, "version": 1}
    back = {**same, "x_shape": x_shape}
    every = (Pass.GRAD_INPUT, Pass.GRAD_WEIGHT)
    clear = share(y_shape[0], 3, *y_shape[1:])
    w = torch.randn(w_shape) if prime is None else torch.randint(-500, 500, w_shape, dtype=torch.int32)
    return Weights(layer="a", version=1, op=op.spec(), prime=prime, tensor=w), [
        ForwardTask(**same, tensor=share(*x_shape), compute=True, keep=True),
        BackwardTask(**back, tensor=share(*y_shape), passes=(Pass.GRAD_INPUT,)),
        BackwardTask(**back, tensor=share(*y_shape), passes=(Pass.GRAD_WEIGHT,)),
        BackwardTask(**back, tensor=share(*y_shape), passes=every),
        BackwardTask(**back, tensor=clear, passes=every, row=(3.0, 5.0, 7.0)),
    ]


def test_every_op_is_measured():
    assert {type(op).name for op, _, _ in CASES.values()} == set(REGISTRY)


@pytest.mark.parametrize("prime", [PRIME, None], ids=["field", "real"])
@pytest.mark.parametrize("case", CASES)
def test_the_estimate_is_an_upper_bound_and_not_a_wild_one(case, prime):
    """Whichever strategy computes; the largest of them is what it must not be many times of."""
    op, x_shape, w_shape = CASES[case]
    weights, tasks = tasks_of(op, x_shape, w_shape, prime)
    estimates = [task_bytes(task, weights, op, Reach.of(op, w_shape, largest=500.0)) for task in tasks]
    largest = [0] * len(tasks)
    for name in STRATEGIES if prime else ["float64"]:
        worker = Executor(engine=LocalEngine(strategy=name))
        worker.handle(weights)
        for place, (task, estimated) in enumerate(zip(tasks, estimates, strict=True)):
            worker.handle(task)  # once before: what torch keeps for later is no part of a task
            measured = peak_of(lambda worker=worker, task=task: worker.handle(task))
            assert measured <= estimated, (name, task, measured, estimated)
            largest[place] = max(largest[place], measured)
    for task, measured, estimated in zip(tasks, largest, estimates, strict=True):
        assert estimated <= 9 * measured + 2**17, (task, measured, estimated)


def test_an_estimate_that_is_exceeded_would_be_noticed(monkeypatch):
    """The test above can fail: without the unfolded patches the bound is too low."""
    op, x_shape, w_shape = CASES["conv"]
    weights, tasks = tasks_of(op, x_shape, w_shape, PRIME)
    worker = Executor(engine=LocalEngine(strategy="float64"))
    worker.handle(weights)
    worker.handle(tasks[0])
    reach = estimate.Reach.of(op, w_shape, largest=500.0)
    monkeypatch.setattr(estimate, "_scratch", lambda *shapes: 0)
    monkeypatch.setattr(estimate, "_others", lambda *shapes: 0)
    monkeypatch.setattr(estimate, "_forward", estimate._forward.__wrapped__)  # which remembers what it was
    assert peak_of(lambda: worker.handle(tasks[0])) > task_bytes(tasks[0], weights, op, reach)


def test_a_task_that_would_not_fit_is_refused_before_anything_is_allocated():
    """A claim of 2^52 bytes: the answer to it could not even be reserved."""
    op = Conv.make((1, 1), stride=2**24)
    worker = Executor(budget=Budget(1 << 30))
    weights = Weights(layer="a", version=1, op=op.spec(), prime=PRIME, tensor=torch.ones(4, 4, 1, 1, dtype=torch.int32))
    worker.handle(weights)
    delta = torch.ones(2, 4, 3, 3, dtype=torch.int32)
    huge = (2, 4, 2**25 + 1, 2**25 + 1)
    task = BackwardTask(layer="a", call=1, version=1, tensor=delta, passes=(Pass.GRAD_INPUT,), x_shape=huge)
    with pytest.raises(OpError, match="no room: the computation and its results needs"):
        worker.handle(task)
    wide = Conv.make((1, 1), padding=2**30)
    worker.handle(Weights(layer="b", version=1, op=wide.spec(), prime=PRIME, tensor=weights.tensor))
    task = ForwardTask(layer="b", call=1, version=1, tensor=delta, compute=True, keep=True)
    with pytest.raises(OpError, match="no room"):
        worker.handle(task)


def test_a_gradient_of_another_shape_is_refused_before_it_is_copied(monkeypatch):
    """Else a task that says little of itself could take much: the passes copy first and compare then."""
    worker = Executor()
    worker.handle(
        Weights(layer="a", version=1, op=Linear().spec(), prime=PRIME, tensor=torch.ones(4, 3, dtype=torch.int32))
    )
    monkeypatch.setattr(field, "centred", lambda *operands: pytest.fail("it was copied"))
    for tensor, row in ((torch.ones(500, 4), None), (torch.ones(2, 3, 5), (1.0, 2.0, 3.0))):
        task = BackwardTask(
            layer="a", call=1, version=1, tensor=tensor, passes=(Pass.GRAD_INPUT,), x_shape=(2, 3), row=row
        )
        with pytest.raises(OpError, match=r"layer a: a gradient .* needs \(2, 4\)"):
            worker.handle(task)
