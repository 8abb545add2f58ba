"""Answers are decoded where somebody else may write to them meanwhile: what is looked at is what is used."""

import threading

import pytest
import torch

from darknight.kernels import compiled_field, compiled_unmasking, reference
from darknight.kernels.compiled_field import Form
from kernels.test_field import PRIMES, built

PRIME = PRIMES[1]
MATRIX = [[1, 0, -1], [0, 1, -1]]


def compiled(kind):
    def run(sources, out, floats):
        ranges = ((0, PRIME - 1),) * len(sources)
        form = Form(tuple(map(tuple, MATRIX)), ranges, PRIME, True)
        return compiled_field.unmask(built(kind), form, sources, list(out), list(floats), 0.25)

    return run


def weighing(kind):
    """Which gives floats alone: the integers are theirs."""

    def run(sources, out, floats):
        form = Form(tuple(map(tuple, MATRIX)), ((0, PRIME - 1),) * len(sources), PRIME, True)
        rows, groups = len(MATRIX), len(sources[0])
        one_by_one = torch.empty(rows * groups, *sources[0].shape[1:])
        function = compiled_unmasking.chosen(kind)
        if function is None:
            pytest.skip("nothing was compiled")
        how = compiled_unmasking.Weighing(
            channels=torch.ones(2, 1, dtype=torch.float64),
            rows=torch.ones(2, rows * groups, dtype=torch.float64),
            positions=sources[0][0].numel(),
            primes=(PRIME,),
            longest=8,
            often=8,
        )
        outside, sums = compiled_unmasking.unmask(function, form, sources, one_by_one, 0.25, how)
        floats.copy_(one_by_one.view(groups, rows, -1).transpose(0, 1))
        out.copy_(floats * 4)
        if not outside:  # what is weighed is what is given
            total = out.to(torch.int64).sum((0, 1)).view(-1)
            half = PRIME // 2
            assert torch.equal(sums[0, 0].to(torch.int64), (total + half).remainder(PRIME) - half)
        return outside

    return run


def summed(sources, out, floats):
    """The sum of all, of one group: in the place of each result."""
    function = compiled_unmasking.chosen()
    if function is None or not compiled_unmasking._in_strips():
        pytest.skip("nothing was compiled, or another processor")
    flat = [source.view(1, 1, -1) for source in sources]
    ones = torch.ones(2, 1, dtype=torch.float64)
    form = Form(((1,) * len(sources),), ((0, PRIME - 1),) * len(sources), PRIME, True)
    how = compiled_unmasking.Weighing(
        channels=ones, rows=ones, positions=flat[0].numel(), primes=(PRIME,), longest=8, often=8
    )
    total = torch.empty(1, 1, flat[0].numel())
    outside, sums = compiled_unmasking.unmask(function, form, flat, total, 0.25, how)
    floats.copy_(total.view(sources[0].shape).expand_as(floats))
    out.copy_(floats * 4)
    if not outside:  # what is weighed is what is given
        assert torch.equal(sums[0, 0], (total * 4).view(-1).to(torch.int32))
    return outside


def by_reference(sources, out, floats):
    return reference.unmask(MATRIX, sources, PRIME, 2, out=out, floats=floats)


def naive(sources, out, floats):
    """Looks first, and then takes what is there by then."""
    outside = [place for place, source in enumerate(sources) if not reference.are_residues(source, PRIME)]
    reference.combine(MATRIX, sources, PRIME, out=out, centred=True)
    return outside


HONEST = {
    "reference": by_reference,
    "compiled": compiled(""),
    "plain": compiled("plain_"),
    "weighed": weighing(""),
    "weighed plain": weighing("plain_"),
    "weighed and summed": summed,
}
UNMASK = pytest.mark.parametrize("unmask", HONEST.values(), ids=HONEST)
INTEGERS = [name for name in HONEST if not name.startswith("weighed")]


def room(shape):
    return torch.empty(len(MATRIX), *shape, dtype=torch.int32), torch.empty(len(MATRIX), *shape)


@pytest.mark.parametrize("name", INTEGERS)  # of the others, tests/kernels/test_unmasking.py says so
@pytest.mark.parametrize("shape", [(1, 7), (2, 1025), (3, 50_001)])
def test_residues_are_decoded_as_ever(name, shape):
    unmask = HONEST[name]
    torch.manual_seed(0)
    sources = [torch.randint(0, PRIME, shape, dtype=torch.int32) for _ in range(3)]
    out, floats = room(shape)
    assert unmask(sources, out, floats) == []
    expected = reference.combine(MATRIX, sources, PRIME, out=torch.empty_like(out), centred=True)
    assert torch.equal(out, expected)
    assert torch.equal(floats, expected * 0.25)


@UNMASK
@pytest.mark.parametrize("value", [-1, PRIME, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("place", [0, 1023, 1024, 2999])
def test_one_number_outside_the_field_names_its_source(unmask, value, place):
    sources = [torch.full((2, 1500), PRIME - 1, dtype=torch.int32) for _ in range(3)]
    assert unmask(sources, *room((2, 1500))) == []  # the control: the largest residue
    sources[1].view(-1)[place] = value
    assert unmask(sources, *room((2, 1500))) == [1]
    sources[2].view(-1)[0] = value
    assert unmask(sources, *room((2, 1500))) == [1, 2]


def inconsistent(unmask, tries):
    """How often results came out that no numbers that passed the look can give, while another thread changes them.

    Of the first source every number is 7, or all are outside the field; the others are 0. So who reports nothing
    outside, and uses what it looked at, has 7 everywhere.
    """
    shape = (2, 60_000)
    sources = [torch.zeros(shape, dtype=torch.int32) for _ in range(3)]
    sources[0].fill_(7)
    over, wrong = threading.Event(), 0

    def change():
        while not over.is_set():
            sources[0].fill_(PRIME + 5)
            sources[0].fill_(7)

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(tries):
            out, floats = room(shape)
            if unmask(sources, out, floats) == []:
                wrong += not bool(out[0].eq(7).all())
    finally:
        over.set()
        thread.join()
    return wrong


@UNMASK
def test_what_was_looked_at_is_what_is_used(unmask):
    assert inconsistent(unmask, 300) == 0


def test_who_reads_twice_is_found_by_that():
    assert sum(inconsistent(naive, 300) for _ in range(5)) > 0
