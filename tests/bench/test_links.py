"""Both kinds of links give the same step, and only one of them shares memory."""

from pathlib import Path

import pytest
import torch

from darknight.bench.links import LINKS, fleet_over
from darknight.bench.steps import examples, network, step_of
from darknight.coding import Scheme
from darknight.errors import UsageError
from darknight.nn import protect_, unprotect_
from darknight.runtime import Runtime

SCHEME = Scheme(inputs=2, colluders=1)


def shares_memory(process: int) -> bool:
    return "/memfd:darknight" in Path(f"/proc/{process}/maps").read_text()


def trained(links):
    """The weights after one step, and whether workers share memory with this process."""
    model = network("small-cnn", 16)
    with fleet_over(links, SCHEME) as fleet, Runtime(SCHEME, fleet, seed=0) as runtime:
        protect_(model, runtime)
        step_of(model, *examples(3, 16), training=True)()
        shared = {shares_memory(process) for process in fleet.processes.values()}
        assert runtime.ledger.sent_bytes > 0
        assert not runtime.ledger.missed
        unprotect_(model)
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]), shared


def test_sealed_links_share_no_memory_and_give_the_same_step():
    found = {links: trained(links) for links in LINKS}
    assert torch.equal(found["shm"][0], found["sealed"][0])
    assert (found["shm"][1], found["sealed"][1]) == ({True}, {False})


def test_other_links_are_unknown():
    with pytest.raises(UsageError, match="needs one of shm, sealed"):
        fleet_over("carrier pigeon", SCHEME)
