"""The worker's executor: exact products, and a refusal in words for what it cannot do."""

import pytest
import torch

from darknight.errors import OpError
from darknight.ops import field, from_spec
from darknight.types import BackwardTask, Forget, ForwardTask, OpSpec, Pass, Weights
from darknight.worker import Executor
from ops.cases import CASES

PRIME = 2**28 - 57


def weights(op, tensor, version=1):
    return Weights(layer="a", version=version, op=op.spec(), prime=PRIME, tensor=tensor)


def forward(share, *, call=1, version=1, compute=True, keep=True):
    return ForwardTask(layer="a", call=call, version=version, tensor=share, compute=compute, keep=keep)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_every_op_survives_its_description_and_is_computed(case):
    assert from_spec(case.op.spec()) == case.op
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, PRIME, case.x_shape, generator=generator, dtype=torch.int32)
    w = torch.randint(-500, 500, case.w_shape, generator=generator, dtype=torch.int32)
    y_shape = case.op.output_shape(case.x_shape, case.w_shape)
    delta = torch.randint(0, PRIME, y_shape, generator=generator, dtype=torch.int32)
    worker = Executor()
    assert worker.handle(weights(case.op, w)) is None
    answer = worker.handle(forward(x))
    assert torch.equal(answer.tensors[Pass.FORWARD], field.forward(case.op, x, w, PRIME))
    passes = (Pass.GRAD_INPUT, Pass.GRAD_WEIGHT)
    task = BackwardTask(layer="a", call=1, version=1, tensor=delta, passes=passes, x_shape=case.x_shape)
    answer = worker.handle(task)
    assert torch.equal(answer.tensors[Pass.GRAD_INPUT], field.grad_input(case.op, delta, w, case.x_shape, PRIME))
    assert torch.equal(answer.tensors[Pass.GRAD_WEIGHT], field.grad_weight(case.op, x, delta, case.w_shape, PRIME))


def test_a_share_is_kept_only_when_asked_and_forgotten_when_told():
    case = CASES[0]
    worker = Executor()
    worker.handle(weights(case.op, torch.ones(case.w_shape, dtype=torch.int32)))
    share = torch.ones(case.x_shape, dtype=torch.int32)
    delta = torch.ones(case.op.output_shape(case.x_shape, case.w_shape), dtype=torch.int32)

    def backward(call):
        passes = (Pass.GRAD_WEIGHT,)
        return BackwardTask(layer="a", call=call, version=1, tensor=delta, passes=passes, x_shape=case.x_shape)

    worker.handle(forward(share, call=1, keep=False))
    with pytest.raises(OpError, match="no input share"):
        worker.handle(backward(1))
    assert worker.handle(forward(share, call=2, compute=False)).tensors == {}
    worker.handle(backward(2))
    worker.handle(Forget(calls=(2,)))
    with pytest.raises(OpError, match="no input share"):
        worker.handle(backward(2))


def test_weights_are_kept_by_version_and_forgotten_when_told():
    case = CASES[0]
    worker = Executor()
    share = torch.ones(case.x_shape, dtype=torch.int32)
    for version in (1, 2):
        worker.handle(weights(case.op, torch.full(case.w_shape, version, dtype=torch.int32), version))
    first, second = (worker.handle(forward(share, version=version)).tensors[Pass.FORWARD] for version in (1, 2))
    assert torch.equal(second, 2 * first)
    worker.handle(Forget(weights=(("a", 1),)))
    with pytest.raises(OpError, match="weights of version 1 never arrived"):
        worker.handle(forward(share, version=1))


def test_everything_can_be_forgotten():
    case = CASES[0]
    worker = Executor()
    worker.handle(weights(case.op, torch.ones(case.w_shape, dtype=torch.int32)))
    worker.handle(Forget(everything=True))
    with pytest.raises(OpError, match="never arrived"):
        worker.handle(forward(torch.ones(case.x_shape, dtype=torch.int32)))


@pytest.mark.parametrize(
    "spec",
    [
        OpSpec("unknown"),
        OpSpec("linear", (("stride", (1,)),)),
        OpSpec("conv"),
        OpSpec(
            "conv",
            (("stride", "wide"), ("padding", (0, 0)), ("padding_mode", "zeros"), ("dilation", (1,)), ("groups", (1,))),
        ),
        OpSpec(
            "conv",
            (("stride", (1,)), ("padding", (0,)), ("padding_mode", "zeros"), ("dilation", (1,)), ("groups", (1,))),
        ),
        OpSpec(
            "conv",
            (("stride", (1,)), ("padding", (0, 0)), ("padding_mode", "secret"), ("dilation", (1,)), ("groups", (1,))),
        ),
        OpSpec(
            "conv",
            (("stride", (1,)), ("padding", (0, 0)), ("padding_mode", "zeros"), ("dilation", (1,)), ("groups", ())),
        ),
        OpSpec("conv_transpose", (("output_padding", (0,)),)),
    ],
)
def test_an_op_that_makes_no_sense_is_refused(spec):
    with pytest.raises(OpError):
        Executor().handle(Weights(layer="a", version=1, op=spec, prime=PRIME, tensor=torch.ones(2, 2)))
