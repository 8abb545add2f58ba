"""A wrong answer never comes back as a result: its worker is named and out, and the step is right without it."""

import re
import threading
import time
from contextlib import ExitStack

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import darknight as dk
from darknight.fleet import Fleet, Member
from darknight.runtime.trial import OTHER, STALE, WRONG, Trial
from darknight.types import Answer, Expected, ForwardTask, Pass, Weights
from darknight.wire import in_process
from darknight.worker import Executor, serve
from fleet.threads import thread_fleet
from runtime.cutting import EXAMPLES, cut  # noqa: F401 - a fixture
from runtime.liars import Liar, fleet_with, off_by_one, step
from runtime.scripts import batch, network, train

pytestmark = pytest.mark.usefixtures("one_thread")

FIELD = dk.Scheme(inputs=3, colluders=1, spares=1)
SCHEMES = {
    "field": FIELD,
    "field-parity": dk.Scheme(inputs=3, colluders=1, spares=1, mixing="dense", integrity="parity"),
    "field-both": dk.Scheme(inputs=3, colluders=1, spares=1, integrity="both"),
    "real": dk.Scheme(inputs=3, colluders=1, arithmetic=dk.Real(1e3)),
    "paper": dk.Scheme.paper(),
}


def gradients(scheme: dk.Scheme, executors: dict[int, Executor] | None) -> tuple[list[Tensor], dk.Runtime]:
    """Of one step, through a fleet with these executors, or alone; and the runtime, for its ledger."""
    with ExitStack() as stack:
        fleet = None if executors is None else stack.enter_context(fleet_with(scheme, executors))
        runtime = stack.enter_context(dk.Runtime(scheme, fleet))
        model = network()
        dk.protect_(model, runtime)
        step(model)
        return [parameter.grad for parameter in model.parameters()], runtime


def does_without(
    scheme: dk.Scheme, number: int, executor: Executor, reason: str, check: str = "", kind: Pass = Pass.FORWARD
) -> None:
    """The step is right although a worker is not, and the ledger says who and why. check: of the evidence."""
    found, runtime = gradients(scheme, {number: executor})
    for gradient, expected in zip(found, gradients(scheme, None)[0], strict=True):
        assert torch.equal(gradient, expected)
    assert set(runtime.ledger.missed) == {f"w{number}"}
    assert re.search(rf"worker {number} \(w{number}\).*{reason}", runtime.ledger.reasons[f"w{number}"])
    found = [(event.worker, event.seat, event.kind, event.check) for event in runtime.ledger.blamed]
    assert found == ([(f"w{number}", number, kind, check)] if check else [])
    assert list(runtime.fleet.quarantined) == ([number] if check else [])


def assert_right(scheme: dk.Scheme, found: list[Tensor]) -> None:
    """Gradients as the enclave alone computes them: bit for bit in the field, nearly in real arithmetic."""
    expected = gradients(scheme, None)[0]
    if isinstance(scheme.arithmetic, dk.Field):
        assert all(map(torch.equal, found, expected))
    else:  # all together: at the paper's noise a small one among them may be off by more
        ours, true = (torch.cat([gradient.flatten() for gradient in each]) for each in (found, expected))
        assert (ours - true).norm() <= 0.15 * true.norm()


@pytest.mark.parametrize("label", SCHEMES)
@pytest.mark.parametrize("kind", list(Pass), ids=lambda kind: kind.value)
def test_one_wrong_element_is_noticed_its_worker_named_and_the_step_right(label, kind):
    scheme = SCHEMES[label]
    check = "parity" if label not in ("field", "real") and kind is not Pass.GRAD_WEIGHT else "freivalds"
    found, runtime = gradients(scheme, {0: Liar(kind, off_by_one)})
    assert_right(scheme, found)
    assert [(event.kind, event.check) for event in runtime.ledger.failed] == [(kind, check)]
    (evidence,) = runtime.ledger.blamed
    assert (evidence.worker, evidence.seat, evidence.kind, evidence.check) == ("w0", 0, kind, check)
    assert evidence.finding == WRONG
    assert not runtime.ledger.missed
    reason = f"it gave {WRONG} (layer {evidence.layer}, call {evidence.call}, {kind.value}; found by {check})"
    assert runtime.fleet.quarantined == {0: reason}  # and no value of data
    if label == "field" and kind is not Pass.GRAD_WEIGHT:  # right answers stay, and a worker that idled stands in
        assert not runtime.ledger.done_in_enclave[kind]
    assert f"w0 is out: {WRONG} (layer {evidence.layer}, call {evidence.call}, {kind.value}" in str(runtime.ledger)


@pytest.mark.parametrize("label", ["field", "field-both", "real"])
def test_all_workers_wrong_together_are_found_by_freivalds(label):
    """Every worker halves the weights that it was given: a codeword, so parity alone would be blind."""
    scheme = SCHEMES[label]

    class Halving(Executor):
        def handle(self, message):
            if isinstance(message, Weights):
                message.tensor.copy_(message.tensor.double().div(2).to(message.tensor.dtype))
            return super().handle(message)

    found, runtime = gradients(scheme, {number: Halving() for number in range(scheme.workers)})
    assert_right(scheme, found)
    assert runtime.ledger.failed[0].check == "freivalds"
    assert {event.finding for event in runtime.ledger.blamed} == {OTHER}
    assert runtime.ledger.done_in_enclave.total() > 0


def test_weights_of_an_earlier_step_are_recognised():
    class Stale(Executor):
        """Computes with the first weights of each layer for ever."""

        def __init__(self):
            super().__init__()
            self.first = {}

        def handle(self, message):
            if isinstance(message, Weights):
                message.tensor.copy_(self.first.setdefault(message.layer, message.tensor.clone()))
            return super().handle(message)

    with fleet_with(FIELD, {0: Stale()}) as fleet, dk.Runtime(FIELD, fleet) as runtime:
        model = network()
        dk.protect_(model, runtime)
        found = train(model)
        (evidence,) = runtime.ledger.blamed
        assert (evidence.worker, evidence.finding, evidence.kind) == ("w0", STALE, Pass.FORWARD)
    alone = network()
    with dk.Runtime(FIELD, None) as runtime:
        dk.protect_(alone, runtime)
        assert torch.equal(found, train(alone))


@pytest.mark.parametrize("label", ["field", "real"])
@pytest.mark.parametrize("kind", list(Pass), ids=lambda kind: kind.value)
def test_if_even_the_enclaves_own_answers_do_not_pass_it_raises_and_nothing_moves(label, kind, monkeypatch):
    """There is no third way: a result that was not verified is not used, whoever computed it."""
    scheme, checked = SCHEMES[label], Trial._checked

    def never(trial, layer, gathered, case):
        if gathered.kind is kind:
            raise dk.errors.IntegrityError(f"layer {layer.label}: no.", kind=kind.value, check="freivalds")
        return checked(trial, layer, gathered, case)

    monkeypatch.setattr(Trial, "_checked", never)
    model = network()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with fleet_with(scheme, {}) as fleet, dk.Runtime(scheme, fleet) as runtime:
        dk.protect_(model, runtime)
        with pytest.raises(dk.errors.IntegrityError, match=r"layer \S+: no\. Not even the enclave's own .*memory"):
            step(model)
        assert not runtime.ledger.blamed
        assert not fleet.quarantined
        assert len(runtime.ledger.unexplained) == 1
    assert all(parameter.grad is None or kind is not Pass.FORWARD for parameter in model.parameters())
    for parameter, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, value)


@pytest.mark.parametrize("found", [True, False])
@pytest.mark.parametrize("kind", list(Pass), ids=lambda kind: kind.value)
def test_errors_too_small_for_each_alone_are_done_by_the_enclave(kind, found, monkeypatch):
    """Real arithmetic: no answer is wrong by itself. Element by element one may be found, or nobody can be named."""
    scheme = SCHEMES["real"]
    monkeypatch.setattr("darknight.integrity.blame.right_in_floats", lambda *_: True)
    if not found:
        monkeypatch.setattr("darknight.integrity.blame.equal_in_floats", lambda *_: True)
    results, runtime = gradients(scheme, {0: Liar(kind, off_by_one)})
    assert_right(scheme, results)
    assert [event.worker for event in runtime.ledger.blamed] == (["w0"] if found else [])
    assert list(runtime.fleet.quarantined) == ([0] if found else [])
    assert bool(runtime.ledger.unexplained) == (not found)
    assert runtime.ledger.done_in_enclave[kind] >= 4


def test_whoever_lied_in_one_pass_of_a_call_is_not_believed_in_the_other():
    class Twice(Executor):
        def handle(self, message):
            answer = super().handle(message)
            if answer is not None and Pass.GRAD_INPUT in answer.tensors:
                off_by_one(answer.tensors[Pass.GRAD_INPUT])
                off_by_one(answer.tensors[Pass.GRAD_WEIGHT])
            return answer

    found, runtime = gradients(FIELD, {0: Twice()})
    assert_right(FIELD, found)
    assert [event.kind for event in runtime.ledger.failed] == [Pass.GRAD_INPUT]
    assert runtime.ledger.done_in_enclave[Pass.GRAD_WEIGHT] > 0


@pytest.mark.parametrize("label", ["real", "paper"])
@pytest.mark.parametrize("size", [1e-36, 1e-42, 1e-300])
def test_results_below_the_range_of_floats_are_nobodys_lie(label, size):
    """Rounding there is no part of the value any more: as in the gradient of a loss that is nearly zero."""
    scheme = SCHEMES[label]
    with thread_fleet(scheme) as fleet, dk.Runtime(scheme, fleet) as runtime:
        model = torch.nn.Linear(20, 10, bias=False)
        dk.protect_(model, runtime)
        with torch.no_grad():
            model.weight.mul_(1 if size > 1e-50 else 1e-30)
        y = model(torch.randn(6, 20).requires_grad_())
        y.backward(torch.randn(6, 10) * max(size, 1e-42))
        assert runtime.ledger.passed.total() == 3
        assert not runtime.ledger.failed
        assert not fleet.quarantined


def test_a_worker_that_was_put_out_can_be_readmitted():
    lying = threading.Event()
    lying.set()
    liar = Liar(Pass.FORWARD, lambda tensor: off_by_one(tensor) if lying.is_set() else tensor)
    with fleet_with(FIELD, {0: liar}) as fleet, dk.Runtime(FIELD, fleet) as runtime:
        model = network()
        dk.protect_(model, runtime)
        step(model)
        assert list(fleet.quarantined) == [0]
        done = runtime.ledger.done_in_enclave.total()
        lying.clear()
        fleet.readmit(0)
        assert not fleet.quarantined
        step(model)
        assert len(runtime.ledger.blamed) == 1
        assert runtime.ledger.done_in_enclave.total() == done  # it works again


def test_with_integrity_off_a_lie_goes_through_and_the_ledger_says_unchecked():
    """The tests above can fail."""
    scheme = dk.Scheme(inputs=3, colluders=1, integrity="off")
    with fleet_with(scheme, {0: Liar(Pass.FORWARD, off_by_one)}) as fleet, dk.Runtime(scheme, fleet) as runtime:
        model = network()
        dk.protect_(model, runtime)
        step(model)
        assert not runtime.ledger.passed
        assert runtime.ledger.unchecked[Pass.FORWARD] == 3
        assert "unchecked" in str(runtime.ledger)


def test_every_pass_of_every_layer_is_checked_by_default():
    with thread_fleet(FIELD) as fleet, dk.Runtime(FIELD, fleet) as runtime:
        model = network()
        dk.protect_(model, runtime)
        step(model)
        assert runtime.ledger.passed == {Pass.FORWARD: 3, Pass.GRAD_INPUT: 3, Pass.GRAD_WEIGHT: 3}
        assert not runtime.ledger.unchecked


def test_parity_schemes_check_the_weight_gradient_by_freivalds():
    scheme = dk.Scheme.paper()
    seen = []
    with thread_fleet(scheme) as fleet, dk.Runtime(scheme, fleet) as runtime:
        record = runtime.ledger.record
        runtime.ledger.record = lambda event: (seen.append(event), record(event))
        model = network()
        dk.protect_(model, runtime)
        step(model)
    checks = {(event.kind, event.check) for event in seen if type(event).__name__ == "Verified"}
    assert checks == {(Pass.FORWARD, "parity"), (Pass.GRAD_INPUT, "parity"), (Pass.GRAD_WEIGHT, "freivalds")}


@pytest.mark.parametrize(
    ("lie", "complaint", "check"),
    [
        (lambda t: t[..., :1].contiguous(), "of shape", "form"),
        (lambda t: t.double(), "and torch.float64", "form"),
        (lambda t: t.fill_(2**30), "outside the field", "range"),
        (lambda t: t.fill_(-1), "outside the field", "range"),
    ],
)
def test_an_answer_of_another_form_names_the_worker_and_is_done_without(lie, complaint, check):
    does_without(FIELD, 2, Liar(Pass.FORWARD, lie), complaint, check)


def test_whoever_breaks_the_protocol_between_two_calls_is_blamed_when_the_next_one_begins():
    seats = []

    def member(number: int) -> Member:
        def dial():
            link, seat = in_process()
            seats.append(seat)
            threading.Thread(target=serve, args=(seat, Executor()), daemon=True).start()
            return link

        return Member(f"w{number}", f"operator-{number}", dial)

    with Fleet([member(number) for number in range(FIELD.workers)]) as fleet, dk.Runtime(FIELD, fleet) as runtime:
        model = network()
        dk.protect_(model, runtime)
        step(model)
        assert not runtime.ledger.blamed
        # Seats are in the order in which workers were dialled, which is nobody's.
        seats[1].write(10_000, Answer(layer="6", call=1, tensors={}, seconds=0.0))
        deadline = time.monotonic() + 60
        while not fleet.quarantined and time.monotonic() < deadline:
            time.sleep(0.05)
        (liar,) = fleet.quarantined
        step(model)
        step(model)
        (evidence,) = runtime.ledger.blamed
        assert (evidence.worker, evidence.check, evidence.layer) == (f"w{liar}", "form", "0")
        assert f"w{liar} is out: something else than an answer" in str(runtime.ledger)
        fleet.readmit(liar)
        step(model)
        assert len(runtime.ledger.blamed) == 1


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "in chunks"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_an_input_that_was_overwritten_blames_nobody(whole, dtype, request):
    if not whole:
        request.getfixturevalue("cut")
    model = torch.nn.Linear(20, 3).to(dtype)
    with thread_fleet(FIELD) as fleet, dk.Runtime(FIELD, fleet) as runtime:
        dk.protect_(model, runtime)
        for example in range(EXAMPLES):
            x = torch.randn(EXAMPLES, 20, dtype=dtype)
            y = model(x)
            x.data[example].mul_(-1)
            with pytest.raises(dk.errors.ProtectError, match="overwritten"):
                y.sum().backward()
            x.data[example].mul_(-1)
            model(x).sum().backward()
        assert not runtime.ledger.failed


def test_an_input_that_was_recomputed_differently_blames_nobody():
    """Dropout that is drawn anew when torch recomputes: plain torch gives wrong gradients, without a word."""
    model = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(20, 3))
    with thread_fleet(FIELD) as fleet, dk.Runtime(FIELD, fleet) as runtime:
        dk.protect_(model, runtime)
        y = checkpoint(model, torch.randn(6, 20).requires_grad_(), use_reentrant=False, preserve_rng_state=False)
        with pytest.raises(dk.errors.ProtectError, match="preserve_rng_state=True"):
            y.sum().backward()


def test_a_worker_that_cannot_compute_says_so():
    def broken(_):
        raise RuntimeError("out of memory")

    does_without(FIELD, 1, Liar(Pass.GRAD_WEIGHT, broken), "refused.*out of memory")


@pytest.mark.parametrize("label", ["field", "field-parity", "real"])
@pytest.mark.parametrize("kind", list(Pass), ids=lambda kind: kind.value)
def test_if_all_workers_refuse_the_enclave_does_the_pass_and_says_so_once(label, kind):
    """A task too large for all of them, or workers that would rather end the training: it ends with right weights."""

    def broken(_):
        raise RuntimeError("out of memory")

    scheme = SCHEMES[label]
    everyone = {number: Liar(kind, broken) for number in range(scheme.workers)}
    with pytest.warns(RuntimeWarning) as told:
        found, runtime = gradients(scheme, everyone)
    assert_right(scheme, found)
    (warning,) = told
    assert re.search(r"worker 0 \(w0\) refused.*out of memory.*enclave does the pass.*smaller", str(warning.message))
    assert runtime.ledger.done_in_enclave[kind] > 0
    assert len(runtime.ledger.missed) >= scheme.base_workers  # a spare is not asked for a weight gradient
    assert not runtime.ledger.blamed
    assert not runtime.fleet.quarantined  # it is no lie


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_worker_that_stops_is_named_and_done_without():
    class Dying(Executor):
        def handle(self, message):
            if isinstance(message, ForwardTask):
                raise SystemExit  # ends the thread, and with it the worker's end of the link
            return super().handle(message)

    does_without(FIELD, 3, Dying(), "the worker stopped")


# --- memory: what a worker is given is its own ------------------------------------------------------------------------
def test_a_worker_that_changes_what_it_was_sent_changes_nothing_of_the_enclave():
    """Weights are also what the enclave checks answers with: they must not be the worker's to change."""

    class Vandal(Executor):
        def handle(self, message):
            answer = super().handle(message)
            if hasattr(message, "tensor"):
                message.tensor.zero_()
            return answer

    def outputs(executors):
        with fleet_with(FIELD, executors) as fleet, dk.Runtime(FIELD, fleet) as runtime:
            model = network()
            dk.protect_(model, runtime)
            with torch.no_grad():
                return model(batch(6)[0])

    honest = outputs({})
    assert torch.equal(outputs({number: Vandal() for number in range(FIELD.workers)}), honest)
    assert torch.equal(outputs({0: Vandal()}), honest)


@pytest.mark.parametrize("label", ["field", "real", "paper"])
def test_no_tensor_that_a_worker_gets_has_memory_beyond_its_own(label):
    """A share is a row of the tensor of all shares, and a view of it would hand out the others."""
    scheme = SCHEMES[label]
    with thread_fleet(scheme, record=True) as fleet, dk.Runtime(scheme, fleet) as runtime:
        model = network()
        dk.protect_(model, runtime)
        step(model)
        for number in range(scheme.workers):
            for record in fleet.transcript(number):
                assert record.tensor.untyped_storage().nbytes() == record.tensor.nbytes, record.kind


def test_an_answer_cannot_be_changed_after_it_was_sent():
    link, seat = in_process()
    task = ForwardTask(layer="a", call=1, version=1, tensor=torch.ones(3), compute=True, keep=False)
    found = link.ask(task, Expected({Pass.FORWARD: (3,)}, torch.float32, None))
    ticket, _ = seat.read()
    answer = Answer(layer="a", call=1, tensors={Pass.FORWARD: torch.ones(3)}, seconds=0.0)
    seat.write(ticket, answer)
    answer.tensors[Pass.FORWARD].zero_()
    assert torch.equal(found.result(timeout=1).tensors[Pass.FORWARD], torch.ones(3))


# --- forms ------------------------------------------------------------------------------------------------------------
def reply(**changes):
    return lambda answer: Answer(**{**vars(answer), **changes})


@pytest.mark.parametrize(
    "forged",
    [
        reply(seconds=float("nan")),
        reply(seconds=-1e9),
        reply(seconds="soon"),
        reply(tensors={}),
        reply(tensors={Pass.FORWARD: torch.ones(3).to_sparse()}),
        reply(tensors={Pass.FORWARD: torch.ones(3, device="meta")}),
        lambda answer: "an answer",
    ],
)
def test_an_answer_of_no_known_form_names_the_worker(forged):
    class Forger(Executor):
        def handle(self, message):
            answer = super().handle(message)
            return answer if answer is None else forged(answer)

    does_without(FIELD, 1, Forger(), "broke the protocol", "form")


def test_a_refusal_is_short_and_harmless_to_a_terminal():
    def broken(_):
        raise RuntimeError("\x1b[2J" + "long " * 1000)

    _, runtime = gradients(FIELD, {1: Liar(Pass.FORWARD, broken)})
    assert runtime.ledger.reasons["w1"].isprintable()
    assert len(runtime.ledger.reasons["w1"]) < 400
