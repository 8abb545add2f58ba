"""The worker's executor: exact products, and a refusal in words for what it cannot do."""

from dataclasses import replace

import pytest
import torch

from darknight.errors import OpError
from darknight.ops import field, from_spec
from darknight.types import BackwardTask, Forget, ForwardTask, OpSpec, Pass, Seed, TooLarge, Weights
from darknight.wire import seeds
from darknight.worker import Executor
from darknight.worker.budget import Budget
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


def test_weights_that_were_refused_are_named_by_the_tasks_that_need_them():
    case = CASES[0]
    share = torch.ones(case.x_shape, dtype=torch.int32)
    worker = Executor()
    worker.handle(weights(case.op, torch.ones(case.w_shape, dtype=torch.int32)))
    with pytest.raises(OpError, match=r"^no room for them$"):
        worker.handle(TooLarge(layer="a", version=1, reason="no room for them"))
    for _ in range(2):  # and the old ones of that version are not used in their place
        with pytest.raises(OpError, match="weights of version 1 were refused: no room for them"):
            worker.handle(forward(share))
    with pytest.raises(OpError):
        worker.handle(Weights(layer="a", version=2, op=OpSpec("unknown"), prime=PRIME, tensor=torch.ones(2, 2)))
    with pytest.raises(OpError, match="weights of version 2 were refused: "):
        worker.handle(forward(share, version=2))
    worker.handle(weights(case.op, torch.ones(case.w_shape, dtype=torch.int32)))
    assert worker.handle(forward(share)).tensors
    worker.handle(Forget(weights=(("a", 2),)))
    with pytest.raises(OpError, match="weights of version 2 never arrived"):
        worker.handle(forward(share, version=2))


def test_reasons_cannot_fill_the_memory():
    worker = Executor()
    for version in range(1000):
        with pytest.raises(OpError):
            worker.handle(TooLarge(layer="a", version=version, reason="no room"))
    assert len(worker._reasons) < 500


def test_everything_that_is_kept_is_counted_and_given_back():
    case = CASES[0]
    budget = Budget(64 << 20)
    worker = Executor(budget=budget)
    share = torch.ones(case.x_shape, dtype=torch.int32)
    for round_ in range(3):
        for version in (1, 2):
            worker.handle(weights(case.op, torch.ones(case.w_shape, dtype=torch.int32), version))
        for call in (1, 2):
            worker.handle(forward(share, call=call))
        with pytest.raises(OpError):  # a task that is refused keeps nothing
            worker.handle(forward(torch.ones(2, 999), call=3))
        counted = budget.held
        assert counted >= 2 * share.nbytes + 2 * 4 * torch.Size(case.w_shape).numel()
        worker.handle(forward(share, call=2))  # again: in the place of the first
        assert budget.held == counted
        if round_ == 1:
            worker.handle(Forget(calls=(1, 2), weights=(("a", 1), ("a", 2))))
            assert budget.held < 1 << 16  # an answer that may be on its way
        worker.handle(Forget(everything=True))
        assert budget.held == 0


def test_a_task_that_does_not_fit_leaves_nothing_behind():
    case = CASES[0]
    worker = Executor(budget=Budget(1 << 16))
    worker.handle(weights(case.op, torch.ones(case.w_shape, dtype=torch.int32)))
    share = torch.ones(case.x_shape, dtype=torch.int32)
    with pytest.raises(OpError, match="no room: the computation"):
        worker.handle(forward(share))
    delta = torch.ones(case.op.output_shape(case.x_shape, case.w_shape), dtype=torch.int32)
    worker = Executor()
    worker.handle(weights(case.op, torch.ones(case.w_shape, dtype=torch.int32)))
    worker.handle(forward(share))
    other = (case.x_shape[0] + 1, *case.x_shape[1:])
    more = torch.cat([delta, delta[:1]])
    task = BackwardTask(layer="a", call=1, version=1, tensor=more, passes=(Pass.GRAD_WEIGHT,), x_shape=other)
    with pytest.raises(OpError, match="the input share kept for call 1 has shape"):
        worker.handle(task)


# --- seeds in the place of shares -------------------------------------------------------------------------------------
SEED = Seed(key=bytes(range(32)), prime=PRIME)


def shadowed(task, shape):
    """As the reader gives it: the form of the share, and its seed."""
    return replace(task, tensor=seeds.shadow(torch.int32, shape), seed=SEED)


@pytest.mark.parametrize("case", CASES[:6], ids=lambda case: case.label)
def test_a_seed_is_computed_with_and_kept_as_the_share_would_be(case):
    w = torch.randint(-500, 500, case.w_shape, generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    x, delta_shape = seeds.expanded(SEED, case.x_shape), case.op.output_shape(case.x_shape, case.w_shape)
    delta = seeds.expanded(SEED, delta_shape)
    passes = (Pass.GRAD_INPUT, Pass.GRAD_WEIGHT)
    backward = BackwardTask(layer="a", call=1, version=1, tensor=delta, passes=passes, x_shape=case.x_shape)
    plain, seeded = Executor(), Executor()
    for worker in (plain, seeded):
        worker.handle(weights(case.op, w))
    for task, shape in ((forward(x), case.x_shape), (backward, delta_shape)):
        wanted, found = plain.handle(task), seeded.handle(shadowed(task, shape))
        assert found.tensors.keys() == wanted.tensors.keys()
        assert all(torch.equal(found.tensors[kind], wanted.tensors[kind]) for kind in wanted.tensors)
    seeded.handle(Forget(calls=(1,)))
    with pytest.raises(OpError, match="no input share"):
        seeded.handle(shadowed(backward, delta_shape))


class Untouched:
    """Stands where seeds are made into shares, and must not be reached."""

    def __call__(self, *given):
        pytest.fail("memory was taken before it was granted")


def test_what_cannot_be_done_is_refused_before_a_seed_is_made_into_a_share(monkeypatch):
    case = CASES[0]
    share = forward(torch.zeros(case.x_shape, dtype=torch.int32))
    budget = Budget(1 << 22)
    worker = Executor(budget=budget)
    worker.handle(weights(case.op, torch.ones(case.w_shape, dtype=torch.int32)))
    worker.handle(shadowed(share, case.x_shape))  # the control: there is room for this one
    held = budget.held
    monkeypatch.setattr(seeds, "expanded", Untouched())
    giant = (1 << 30, *case.x_shape[1:])
    others = replace(SEED, prime=97)
    refused = {
        "no room": shadowed(replace(share, call=2), giant),
        "never arrived": shadowed(replace(share, version=9, call=3), case.x_shape),
        "another field": replace(shadowed(replace(share, call=4), case.x_shape), seed=others),
    }
    for words, task in refused.items():
        with pytest.raises(OpError, match=words):
            worker.handle(task)
        assert budget.held == held
    with pytest.raises(OpError):  # a form that does not fit the weights
        worker.handle(shadowed(replace(share, call=5), (3, 1, 1, 1, 1)))


def test_a_seed_in_real_arithmetic_is_refused():
    case = CASES[0]
    worker = Executor()
    worker.handle(replace(weights(case.op, torch.ones(case.w_shape)), prime=None))
    with pytest.raises(OpError, match="another field"):
        worker.handle(shadowed(forward(torch.zeros(case.x_shape)), case.x_shape))


def test_making_the_share_is_a_part_of_the_turn(monkeypatch):
    """Sessions share a processor fairly, whatever an enclave has its worker expand."""
    case, inside, made = CASES[0], [], seeds.expanded

    class Turn:
        def __enter__(self):
            inside.append(True)

        def __exit__(self, *error):
            inside.pop()

    def expanded(seed, shape):
        assert inside
        return made(seed, shape)

    monkeypatch.setattr(seeds, "expanded", expanded)
    worker = Executor(Turn())
    worker.handle(weights(case.op, torch.ones(case.w_shape, dtype=torch.int32)))
    answer = worker.handle(shadowed(forward(torch.zeros(case.x_shape, dtype=torch.int32)), case.x_shape))
    assert Pass.FORWARD in answer.tensors
