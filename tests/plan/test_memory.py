"""A worker with the memory that a plan says refuses nothing, and with less it does."""

import threading

import pytest
import torch
from torch.nn.functional import cross_entropy

import darknight as dk
from darknight.coding import PRIME_25, PRIME_28
from darknight.fleet import Fleet, Member
from darknight.models import build_model
from darknight.plan import make_plan, memory
from darknight.runtime import crew
from darknight.types import Seed
from darknight.wire import in_process, seeds
from darknight.worker import Executor, serve
from darknight.worker.budget import OVERHEAD, Budget
from plan.requests import BATCH, CLASSES, SHAPE, request

_turn = threading.Lock()


class Watched(Budget):
    """Notes the most that was ever kept for good: without the answer that is on its way."""

    most = 0

    def keep(self, key, nbytes):
        super().keep(key, nbytes)
        self.most = max(self.most, sum(size for name, size in self._kept.items() if name != "answer"))


def train(plan, limit, steps=2):
    """Two steps with workers that have so much memory; what each of them kept at most."""
    budgets = [Watched(limit) for _ in range(plan.scheme.workers)]

    def member(number):
        def dial():
            link, seat = in_process(None)
            executor = Executor(turn=_turn, budget=budgets[number])
            threading.Thread(target=serve, args=(seat, executor), daemon=True).start()
            return link

        return Member(f"thread-{number}", f"operator-{number}", dial)

    model = build_model(plan.request.model, shape=SHAPE, classes=CLASSES, seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    images = torch.randn(BATCH, *SHAPE, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(BATCH) % CLASSES
    with Fleet([member(j) for j in range(plan.scheme.workers)]) as fleet, dk.Runtime(plan.scheme, fleet) as runtime:
        dk.protect_(model, runtime)
        for _ in range(steps):
            optimizer.zero_grad()
            cross_entropy(model(images), labels).backward()
            optimizer.step()
        missed = runtime.ledger.missed
    return missed, [budget.most for budget in budgets]


ARITHMETICS = pytest.mark.parametrize(
    "arithmetic", [{}, {"arithmetic": "real", "leakage_target": 1e-2}], ids=["field", "real"]
)
MODELS = pytest.mark.parametrize("model", ["small-cnn", "resnet-small"])


@ARITHMETICS
@MODELS
def test_a_worker_with_so_much_memory_refuses_nothing(model, arithmetic):
    plan = make_plan(request(model=model, **arithmetic))
    missed, most = train(plan, plan.memory.worker)
    assert not missed
    # The K + 2M keep weights and shares, also of the step before, until they are told that it is over.
    keepers, spares = most[: plan.scheme.base_workers], most[plan.scheme.base_workers :]
    keeps = plan.memory.worker_keeps
    assert all(keeps <= kept < keeps + memory._OVER for kept in keepers)
    assert all(kept < keepers[0] for kept in spares)  # a spare keeps no share


@ARITHMETICS
@MODELS
def test_what_is_kept_is_counted_exactly_if_workers_are_told_at_once(model, arithmetic, monkeypatch):
    monkeypatch.setattr(crew, "WORTH", 0)
    plan = make_plan(request(model=model, **arithmetic))
    missed, most = train(plan, plan.memory.worker - memory._OVER)
    assert not missed
    # The K + 2M keep weights and shares; the spare keeps no share.
    assert most[: plan.scheme.base_workers] == [plan.memory.worker_keeps] * plan.scheme.base_workers
    assert all(kept < plan.memory.worker_keeps for kept in most[plan.scheme.base_workers :])


def test_what_is_over_is_planned_for_as_much_as_the_runtime_leaves_untold():
    assert memory._OVER == crew.WORTH + crew.MANY * OVERHEAD


def test_with_less_than_it_keeps_it_refuses():
    plan = make_plan(request(model="small-cnn"))
    with pytest.warns(RuntimeWarning, match="every worker refused its task.*no room"):
        train(plan, plan.memory.worker_keeps - 1, steps=1)


def test_the_overhead_is_that_of_the_worker():
    assert memory._OVERHEAD == OVERHEAD


def peak_of(work):
    """The most bytes that torch held at once in this thread, beyond what it held before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


@pytest.mark.parametrize("prime", [PRIME_25, PRIME_28])
def test_what_a_share_from_a_seed_takes_beside_it_is_planned_for(prime):
    for count in (1, 1000, 1 << 20, 1 << 30):
        task = memory.ForwardTask(
            layer="",
            call=0,
            version=0,
            tensor=seeds.shadow(torch.int32, (count,)),
            compute=True,
            keep=False,
            seed=Seed(key=bytes(32), prime=prime),
        )
        assert 0 < seeds.scratch_bytes(task) <= memory._SEED


@ARITHMETICS
def test_the_enclave_takes_at_least_what_is_said_and_not_many_times_more(arithmetic):
    """Without workers, so that their memory is not counted: the shares are not made then, and are left out here."""
    asked = request(model="resnet-small", shape=(3, 48, 32), batch_size=32, examples=64, **arithmetic)
    plan = make_plan(asked)
    shares = max(
        max(each.input_shares + each.outputs, each.gradient_shares + each.input_gradients + each.weight_gradients)
        for each in (layer.traffic for layer in plan.layers)
    )
    images, labels = torch.randn(32, 3, 48, 32), torch.arange(32) % CLASSES

    def work():
        model = build_model("resnet-small", shape=(3, 48, 32), classes=CLASSES, seed=0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        with dk.Runtime(plan.scheme, None) as runtime:
            dk.protect_(model, runtime)
            for _ in range(2):
                optimizer.zero_grad()
                cross_entropy(model(images.clone()), labels).backward()
                optimizer.step()

    least = plan.memory.enclave_at_least - shares
    assert least <= peak_of(work) <= 4 * least
