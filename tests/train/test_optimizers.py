"""The optimizers of recipes are torch's, in one pass; what they remember is what torch's others remember."""

import pytest
import torch
from torch import nn

from darknight.train.optimizers import load_optimizer, make_optimizer, optimizer_tensors
from train.saved import recipe

RECIPES = {
    "sgd": recipe(weight_decay=0.01),
    "nesterov": recipe(nesterov=True),
    "adam": recipe(optimizer="adam", weight_decay=0.01),
    "adamw": recipe(optimizer="adamw", weight_decay=0.01),
}
RECIPE = pytest.mark.parametrize("how", RECIPES.values(), ids=RECIPES)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3 * 2 * 3, 37))


def without_fusing(optimizer):
    for group in optimizer.param_groups:
        group["fused"] = False
    return optimizer


def steps(model, optimizer, numbers):
    for number in numbers:
        for place, parameter in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(100 * number + place)
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()


def close(one, other):
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


@RECIPE
def test_every_group_is_fused(how):
    assert all(group["fused"] for group in make_optimizer(network(), how).param_groups)


@RECIPE
@pytest.mark.parametrize("fused_first", [True, False])
def test_a_state_goes_on_in_either(how, fused_first):
    whole, first, second = network(), network(), network()
    steps(whole, without_fusing(make_optimizer(whole, how)), range(6))
    begun, ended = make_optimizer(first, how), make_optimizer(second, how)
    without_fusing(ended if fused_first else begun)
    steps(first, begun, range(3))
    second.load_state_dict(first.state_dict())
    load_optimizer(ended, second, how, optimizer_tensors(begun, first))
    steps(second, ended, range(3, 6))
    close(second, whole)
    # Without what it remembered it comes out elsewhere: the test can fail.
    forgetful = network()
    forgetful.load_state_dict(first.state_dict())
    steps(forgetful, make_optimizer(forgetful, how), range(3, 6))
    with pytest.raises(AssertionError):
        close(forgetful, whole)


@RECIPE
def test_the_number_of_threads_changes_no_bit(how):
    found = []
    for threads in (1, 2):
        torch.manual_seed(0)
        model, before = nn.Linear(701, 301), torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            steps(model, make_optimizer(model, how), range(4))
        finally:
            torch.set_num_threads(before)
        found.append(model)
    for one, other in zip(*(model.parameters() for model in found), strict=True):
        assert torch.equal(one, other)
