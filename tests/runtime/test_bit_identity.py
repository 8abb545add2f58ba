"""Field training through workers is bit for bit the enclave's own; overflow is noticed and costs scale, not truth."""

import itertools

import pytest
import torch

import darknight as dk
from darknight.integrity.weighing import Moduli
from darknight.kernels import compiled_sides, masking, residues
from fleet.threads import thread_fleet
from runtime.scripts import batch, forced, network, train, trained_alone, trained_by_fleet

pytestmark = pytest.mark.usefixtures("one_thread")

SCHEMES = [
    {"inputs": K, "colluders": M, "spares": E, "mixing": mixing, "mask_gradients": masked}
    for K, M, E, mixing, masked in itertools.product(
        (1, 2, 3, 4, 5), (1, 2), (0, 1), ("systematic", "dense"), (True, False)
    )
]
FEW = [*SCHEMES[::11], {"inputs": 8, "colluders": 1}, {"inputs": 2, "colluders": 3, "spares": 1}]


def name(settings: dict) -> str:
    return "-".join(str(value) for value in settings.values())


@pytest.mark.parametrize("settings", FEW, ids=name)
@pytest.mark.parametrize("examples", [1, 4, 7])
@pytest.mark.filterwarnings("ignore::darknight.errors.PrivacyWarning")
def test_workers_and_enclave_train_the_same_weights(settings, examples):
    scheme = dk.Scheme(**settings)
    alone = trained_alone(scheme, examples)
    assert torch.equal(trained_by_fleet(scheme, examples), alone)
    # The arithmetic alone decides: neither K, M, E nor the mixing does.
    assert torch.equal(alone, trained_alone(dk.Scheme(inputs=4, colluders=1), examples))


@pytest.mark.full
@pytest.mark.parametrize("examples", [1, 2, 5, 8, 13])
@pytest.mark.filterwarnings("ignore::darknight.errors.PrivacyWarning")
def test_workers_and_enclave_train_the_same_weights_for_every_scheme(examples):
    alone = trained_alone(dk.Scheme(**SCHEMES[0]), examples)
    for settings in SCHEMES:
        assert torch.equal(trained_by_fleet(dk.Scheme(**settings), examples), alone), settings


@pytest.mark.parametrize("prime", [2**25 - 39, 2**28 - 57])
@pytest.mark.parametrize(("integrity", "spares"), [("parity", 0), ("both", 1), ("off", 0)])
def test_so_it_is_with_every_check_and_prime(prime, integrity, spares):
    scheme = dk.Scheme(inputs=3, colluders=1, spares=spares, arithmetic=dk.Field(prime, 9), integrity=integrity)
    assert torch.equal(trained_by_fleet(scheme), trained_alone(scheme))


@pytest.mark.parametrize("examples", [4, 7])
def test_compiled_kernels_and_the_reference_train_the_same_weights(monkeypatch, examples):
    scheme = dk.Scheme(inputs=3, colluders=1)
    compiled = trained_by_fleet(scheme, examples)
    if masking.chosen() is None:
        pytest.skip("no compiled kernels here")
    monkeypatch.setattr(masking, "chosen", lambda: None)
    for module in (residues, compiled_sides):
        monkeypatch.setattr(module, "chosen", lambda: None)
    assert torch.equal(trained_by_fleet(scheme, examples), compiled)
    assert torch.equal(trained_alone(scheme, examples), compiled)


def test_the_seed_decides_the_rounding_and_the_masks_do_not():
    scheme = dk.Scheme(inputs=3, colluders=1)
    first = trained_by_fleet(scheme, seed=5)
    assert torch.equal(first, trained_by_fleet(scheme, seed=5))
    assert not torch.equal(first, trained_by_fleet(scheme, seed=6))


def test_training_is_close_to_plain_training():
    plain, private = train(network(), steps=4), trained_alone(dk.Scheme(inputs=4, colluders=1), steps=4)
    start = torch.cat([parameter.detach().flatten() for parameter in network().parameters()])
    moved = torch.nn.functional.cosine_similarity(plain - start, private - start, dim=0)
    assert moved > 0.99


# --- overflow ---------------------------------------------------------------------------------------------------------
def gradients(runtime_of, examples: int = 6):
    model = network()
    with runtime_of() as runtime:
        dk.protect_(model, runtime)
        x, target = batch(examples)
        x.requires_grad_()
        torch.nn.functional.cross_entropy(model(x), target).backward()
        found = [x.grad, *(parameter.grad for parameter in model.parameters())]
        return found, runtime.ledger.overflows.total()


@pytest.mark.parametrize("excess", [0, 3])  # 3: eight times too large
def test_every_wrap_is_noticed_and_the_result_is_that_of_the_smaller_scale(monkeypatch, excess):
    scheme = dk.Scheme(inputs=4, colluders=1)
    forced(monkeypatch, excess)
    with thread_fleet(scheme) as fleet:
        by_fleet, fleet_overflows = gradients(lambda: dk.Runtime(scheme, fleet))
    # Alone, every element is compared with the range: the smaller scale is the first at which none leaves it.
    alone, overflows = gradients(lambda: dk.Runtime(scheme, None))
    assert overflows > 0
    assert fleet_overflows == overflows
    for found, wanted in zip(by_fleet, alone, strict=True):
        assert torch.equal(found, wanted)


def test_an_unnoticed_wrap_would_change_the_result(monkeypatch):
    """The test above can fail: without the second field wrapped results come back as if nothing had happened."""
    scheme = dk.Scheme(inputs=4, colluders=1)
    forced(monkeypatch, 3)
    alone, _ = gradients(lambda: dk.Runtime(scheme, None))
    for module in ("freivalds", "weighed"):
        monkeypatch.setattr(f"darknight.integrity.{module}.moduli_for", lambda prime, wraps: Moduli((prime, prime)))
    with thread_fleet(scheme) as fleet:
        blind, overflows = gradients(lambda: dk.Runtime(scheme, fleet))
    assert overflows == 0
    assert not all(torch.equal(found, wanted) for found, wanted in zip(blind, alone, strict=True))


def test_what_fits_no_scale_is_refused_with_advice(monkeypatch):
    monkeypatch.setattr("darknight.runtime.alone.FieldAlone._in_range", _never)
    with pytest.raises(dk.errors.EncodingError, match=r"layer 0: .*smaller batch"):
        gradients(lambda: dk.Runtime(dk.Scheme(inputs=4, colluders=1), None))


def _never(self, values, kind):
    raise dk.errors.RangeError("too large", kind=kind.value, check="range")


def test_a_scheme_without_freivalds_leaves_the_range_to_no_chance():
    """Coherent signs: the estimate of independent values is far too low, and nothing would notice."""
    scheme = dk.Scheme(inputs=2, colluders=1, integrity="off")
    model = torch.nn.Linear(4096, 3, bias=False)
    torch.nn.init.constant_(model.weight, 0.7)
    x = torch.full((4, 4096), 0.9)
    with thread_fleet(scheme) as fleet, dk.Runtime(scheme, fleet) as runtime:
        dk.protect_(model, runtime)
        torch.testing.assert_close(model(x), torch.full((4, 3), 4096 * 0.63), rtol=0.01, atol=0)


# --- state ------------------------------------------------------------------------------------------------------------
def test_the_runtimes_state_lets_training_go_on_as_if_nothing_had_happened():
    scheme = dk.Scheme(inputs=4, colluders=1)
    undisturbed = trained_alone(scheme, steps=4)
    model = network()
    with dk.Runtime(scheme, None) as runtime:
        dk.protect_(model, runtime)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step(number):
            x, target = batch(7, seed=number)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), target).backward()
            optimizer.step()

        step(0)
        step(1)
        state = runtime.state_dict()
    dk.unprotect_(model)
    with dk.Runtime(scheme, None) as runtime:
        dk.protect_(model, runtime)
        runtime.load_state_dict(state)
        step(2)
        step(3)
    assert torch.equal(torch.cat([p.detach().flatten() for p in model.parameters()]), undisturbed)


def test_the_state_of_products_that_no_module_stands_for_waits_for_their_first_call():
    """They are layers of the runtime from their first call on, which may be after the state was loaded."""
    scheme = dk.Scheme(inputs=2, colluders=1)

    class Own(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.matrix = torch.nn.Parameter(torch.ones(3, 4))

        def forward(self, x):
            return torch.nn.functional.linear(x, self.matrix)

    def gradients(state):
        model = Own()
        with dk.Runtime(scheme, None) as runtime:
            dk.protect_(model, runtime)
            if state is not None:
                runtime.load_state_dict(state)
            model(torch.linspace(-1, 1, 20).view(5, 4)).square().sum().backward()
            return model.matrix.grad, runtime.state_dict()

    first, state = gradients(None)
    second, later = gradients(state)
    assert [found["layers"]["matrix"]["gradients"] for found in (state, later)] == [1, 2]
    assert not torch.equal(first, second)  # the rounding went on


def test_the_state_of_another_model_is_refused():
    with dk.Runtime(dk.Scheme(inputs=2, colluders=1), None) as runtime:
        dk.protect_(network(), runtime)
        with pytest.raises(dk.errors.UsageError, match="other layers"):
            runtime.load_state_dict({"seed": 0, "layers": {"elsewhere": {}}})
        with pytest.raises(dk.errors.UsageError, match="of seed 1"):
            runtime.load_state_dict({**runtime.state_dict(), "seed": 1})
        with pytest.raises(dk.errors.UsageError, match="no state"):
            runtime.load_state_dict({"0": {}})


def test_a_model_that_is_protected_again_begins_again():
    """Names are free when a model is unprotected: the second training is the first one, bit for bit."""
    scheme = dk.Scheme(inputs=4, colluders=1)
    with thread_fleet(scheme) as fleet, dk.Runtime(scheme, fleet) as runtime:
        found = []
        for _ in range(2):
            model = network()
            dk.protect_(model, runtime)
            found.append(train(model))
            assert set(runtime.state_dict()["layers"]) == {"0", "2", "6"}
            dk.unprotect_(model)
            assert not runtime.state_dict()["layers"]
    assert torch.equal(*found)
