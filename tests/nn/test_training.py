"""What real training scripts do, each against the plain model."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointError, checkpoint
from torch.utils.data import DataLoader, TensorDataset

import darknight as dk
from darknight.errors import PrivacyWarning
from nn.networks import cnn, mlp, trained
from nn.three_ways import batches, compare, fleet_runtime, random, train

pytestmark = pytest.mark.usefixtures("one_thread")


# --- training -------------------------------------------------------------------------------------------------------
def test_a_training_loop():
    compare(mlp, trained)


def test_a_convolutional_network_with_batch_norm():
    def script(model):
        train(model, batches(size=8, shape=(2, 8, 8)), lr=0.02)
        return [model.eval()(random(4, 2, 8, 8))]

    compare(cnn, script, tolerance=0.05)


def test_an_in_place_relu_right_behind_a_layer():
    def script(model):
        x = random(4, 5).requires_grad_()
        y = F.relu_(model[0](x))
        (y**2).sum().backward()
        return [y, x.grad]

    compare(mlp, script)


def test_an_in_place_relu_behind_an_unbatched_call():
    def script(model):
        y = model[0](random(5)).relu_()
        y.sum().backward()
        return [y]

    with pytest.warns(PrivacyWarning):
        compare(mlp, script)


class Repeated(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(5, 5)

    def forward(self, x):
        return self.inner(self.inner(self.inner(x).tanh()).tanh())


def test_a_layer_called_several_times_in_one_forward():
    def script(model):
        x = random(4, 5).requires_grad_()
        y = model(x)
        y.square().sum().backward()
        return [y, x.grad]

    report = compare(Repeated, script)
    assert [row.calls for row in report.masked] == [3]


def test_two_modules_with_one_weight():
    def build():
        model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5))
        model[2].weight = model[0].weight
        return model

    compare(build, lambda model: [train(model, batches(classes=5)), model(random(4, 5))])


def test_one_module_at_two_places():
    def build():
        layer = nn.Linear(5, 5)
        return nn.Sequential(layer, nn.Tanh(), layer)

    compare(build, lambda model: [train(model, batches(classes=5)), model(random(4, 5))])


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.body = nn.Linear(4, 4)

    def forward(self, words):
        return F.linear(self.body(self.embedding(words)).tanh(), self.embedding.weight)


def test_an_embedding_tied_to_the_output():
    def script(model):
        logits = model(torch.tensor([[0, 1, 2], [3, 4, 5]]))
        logits.square().sum().backward()
        return [logits]

    report = compare(Tied, script)
    assert {row.name for row in report.masked if row.calls} == {"embedding", "body"}


@pytest.mark.parametrize("frozen", [("0.weight",), ("0.weight", "0.bias"), ("2.weight",), ("0.bias", "2.bias")])
def test_frozen_parameters(frozen):
    def build():
        model = mlp()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in frozen)
        return model

    compare(build, trained)


def test_biases_alone_are_trained():
    def build():
        model = mlp()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("bias" in name)
        return model

    compare(build, trained)


def test_a_frozen_model_in_front_of_the_input_gradient():
    def script(model):
        x = random(4, 5).requires_grad_()
        model.requires_grad_(False)(x).square().sum().backward()
        return [x.grad]

    compare(mlp, script)


def test_gradients_of_input_and_weights_together():
    def script(model):
        x = random(4, 5).requires_grad_()
        grads = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
        return list(grads)

    compare(mlp, script)


def test_gradients_add_up_over_several_backward_passes():
    def script(model):
        for x, target in batches():
            (F.cross_entropy(model(x), target) / 3).backward()
        return []

    compare(mlp, script)


def test_a_graph_that_is_kept_for_a_second_backward_pass():
    def script(model):
        loss = model(random(4, 5)).square().sum()
        loss.backward(retain_graph=True)
        once = [p.grad.clone() for p in model.parameters()]
        loss.backward()
        return once

    compare(mlp, script)


def test_a_second_backward_pass_without_a_kept_graph_is_refused_as_usual():
    def script(model):
        loss = model(random(4, 5)).square().sum()
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        return []

    compare(mlp, script)


def test_two_forwards_then_two_backwards():
    def script(model):
        first, second = model(random(4, 5)), model(random(4, 5, seed=8))
        second.square().sum().backward()
        first.square().sum().backward()
        return [first, second]

    compare(mlp, script)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant):
    def script(model):
        x = random(4, 5).requires_grad_()
        h = checkpoint(model[:2], x, use_reentrant=reentrant)
        y = model[2](h)
        y.square().sum().backward()
        return [y, x.grad]

    compare(mlp, script)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_with_dropout(reentrant):
    def build():
        return nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.4), nn.Linear(7, 3))

    def script(model):
        torch.manual_seed(3)
        x = random(4, 5).requires_grad_()
        checkpoint(model, x, use_reentrant=reentrant).square().sum().backward()
        return [x.grad]

    compare(build, script)


class CheckpointsItself(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 5))
        self.reentrant = reentrant

    def block(self, x):
        return F.linear(x, self.weight).tanh()

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=self.reentrant)


def test_a_checkpointed_function_that_calls_linear_is_recomputed_unseen_and_never_wrongly():
    """Nobody watches while torch recomputes a method that is not a module: the how-to says to checkpoint modules."""
    with dk.Runtime(dk.Scheme(inputs=2, colluders=1), None) as runtime:
        model = CheckpointsItself(reentrant=False)
        dk.protect_(model, runtime)
        with pytest.raises(CheckpointError):
            model(random(4, 5).requires_grad_()).square().sum().backward()
        model, plain = CheckpointsItself(reentrant=True), CheckpointsItself(reentrant=True)
        plain.load_state_dict(model.state_dict())
        dk.protect_(model, runtime)
        inputs = [random(4, 5).requires_grad_() for _ in range(2)]
        model(inputs[0]).square().sum().backward()
        plain(inputs[1]).square().sum().backward()
        torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=0.02, atol=0.02)


def test_an_optimizer_with_a_closure():
    def script(model):
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, lr=0.1)
        x, target = batches(1)[0]

        def closure():
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), target)
            loss.backward()
            return loss

        optimizer.step(closure)
        return []

    compare(mlp, script, tolerance=0.05)


def test_a_data_loader_whose_last_batch_the_inputs_do_not_divide():
    def script(model):
        x, target = random(7, 5), torch.arange(7) % 3
        loader = DataLoader(TensorDataset(x, target), batch_size=4)
        train(model, list(loader))
        return [model(x)]

    compare(mlp, script, scheme=dk.Scheme(inputs=4, colluders=1))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_batches_of_every_size(size):
    def script(model):
        x = random(size, 5).requires_grad_()
        y = model(x)
        y.square().sum().backward()
        return [y, x.grad]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivacyWarning)
        compare(mlp, script, scheme=dk.Scheme(inputs=3, colluders=1))


def test_a_batch_of_one_in_training_warns_once():
    model = mlp()
    with fleet_runtime() as runtime:
        dk.protect_(model, runtime)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with torch.no_grad():
                model(random(1, 5))  # no gradient, no warning
        with pytest.warns(PrivacyWarning, match="batch of one"):
            model(random(1, 5)).sum().backward()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(random(1, 5)).sum().backward()


@pytest.mark.parametrize(("build", "shape"), [(mlp, (5,)), (lambda: cnn().eval(), (2, 8, 8))])
def test_an_empty_batch(build, shape):
    def script(model):
        x = torch.empty(0, *shape).requires_grad_()
        y = model(x)
        y.sum().backward()
        return [y, x.grad]

    compare(build, script)


def test_nothing_is_sent_for_an_empty_batch():
    with fleet_runtime() as runtime:
        model = mlp()
        dk.protect_(model, runtime)
        model(torch.empty(0, 5))
        assert not runtime.fleet.transcript(0)
