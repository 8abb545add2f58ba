"""What a worker has in its hands: all of its memory, and all that its reader saw, hold nothing of private images.

Real training through real worker processes, stopped between the forward and the backward pass of a step, when workers
keep their shares. Whoever looks knows the images and only has to recognise them (tests/fleet/observing.py says how).
Each way of looking is tried on broken schemes too, whose noise is zero, and must find the images there.

Replies are not looked at by themselves: a worker makes them of what it has received. Nor are deeper layers of the dense
code in the field without noise: whether a share mixes them exactly can be told only of numbers that are known exactly.
"""

import math
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial

import pytest
import torch
from torch import nn

from darknight.coding import PRIME_28, Real, Scheme, field, real, virtual_batches
from darknight.fleet import connect, local_fleet
from darknight.nn import protect_, unprotect_
from darknight.runtime import Runtime
from darknight.types import ForwardTask
from darknight.wire.identity import WORKER, Identity
from fleet.observing import Memory, Sight, look, smooth_images
from fleet.workers import free_port, real_workers

SCHEMES = {
    "systematic": Scheme(inputs=2, colluders=1),
    "dense": Scheme(inputs=2, colluders=1, mixing="dense"),
    "real": Scheme(inputs=2, colluders=1, mixing="dense", arithmetic=Real(noise_std=1e4)),
}
IMAGES, CLASSES = 8, 32
FOUND = 0.9  # correlation
# Above the floor: from one set of images to the next the largest of a million correlations varies by up to 0.1.
MARGIN = 0.15

pytestmark = pytest.mark.usefixtures("one_thread", "cold_fleets")


# --- training ---------------------------------------------------------------------------------------------------------
@contextmanager
def no_noise():
    """A broken enclave: everything is encoded as always, but the noise is zero."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            field,
            "_noise",
            lambda mixing, shape, prime, stream: (torch.zeros(mixing.colluders, *shape, dtype=torch.int32), {}),
        )
        patch.setattr(real, "grid_gaussian", lambda stream, shape, *size: torch.zeros(shape, dtype=torch.int64))
        yield


@contextmanager
def half_a_step(fleet, scheme, images):
    """Two steps of training, and the forward pass of a third, whose backward pass comes when the block ends.

    Gives what is private: the inputs of every layer and the gradients of their outputs, by (layer, kind of record).
    """
    torch.manual_seed(0)
    layers = {"first": nn.Conv2d(1, 4, 3, stride=2), "second": nn.Conv2d(4, 8, 3, stride=2)}
    model = nn.Sequential()
    for name, layer in layers.items():
        model.add_module(name, layer)
        model.append(nn.ReLU())
    model.append(nn.Flatten())
    model.add_module("last", nn.Linear(200, CLASSES))
    private = defaultdict(list)
    for name in ("first", "second", "last"):
        model.get_submodule(name).register_forward_hook(partial(_note, private, name))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    labels = torch.arange(IMAGES)
    with Runtime(scheme, fleet) as runtime:
        protect_(model, runtime)
        for _ in range(2):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
        loss = nn.functional.cross_entropy(model(images), labels)
        yield private
        loss.backward()
        unprotect_(model)


def _note(private, name, module, inputs, output):
    private[name, "forward.share"].append(inputs[0].detach().clone())
    output.register_hook(lambda gradient: private[name, "backward.share"].append(gradient.clone()))


# --- what was found ---------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Case:
    """One training. memory and reader: by worker. layers: largest correlation, and by chance, by (layer, kind)."""

    memory: dict[int, Sight]
    reader: dict[int, Sight]
    layers: dict[tuple[str, str], tuple[float, float]]


@pytest.fixture(scope="module")
def cases():
    """Trains with a scheme, with or without noise, and looks around. Each training has images of its own."""
    with local_fleet(SCHEMES["systematic"], record=True, patience=60) as fleet:
        memories = {worker: _memory(fleet.processes[worker]) for worker in (0, 3)}

        @cache
        def case(name, noise):
            number = 2 * list(SCHEMES).index(name) + noise
            images, others = smooth_images(IMAGES, seed=number), smooth_images(IMAGES, seed=100 + number)
            before = [len(fleet.transcript(worker)) for worker in range(4)]
            with half_a_step(fleet, SCHEMES[name], images) as private:
                # In the systematic code worker 0 gets the share of an image and worker 3 nothing but noise; in the
                # dense code all are alike.
                scanned = (0, 3) if name == "systematic" and noise else (0,)
                contents = {worker: memories[worker].new_content() for worker in scanned}
                seen = {worker: fleet.transcript(worker)[start:] for worker, start in enumerate(before)}
                for worker, content in contents.items():
                    _assert_shares_are_in(content, [record.tensor for record in seen[worker] if _is_image(record)])
            received = {
                worker: [r for r in records if not r.kind.endswith("reply")] for worker, records in seen.items()
            }
            return Case(
                memory={worker: look(content, images, others) for worker, content in contents.items()},
                reader={worker: look(_bytes(records), images, others) for worker, records in received.items()},
                layers=_layers([record for records in received.values() for record in records], private),
            )

        def with_or_without(name, *, noise=True):
            if noise:
                return case(name, True)
            with no_noise():
                return case(name, False)

        yield with_or_without


def _memory(pid):
    try:
        return Memory(pid)
    except PermissionError:
        pytest.skip("this system lets nobody read the memory of another process (ptrace)")


def _is_image(record):
    return (record.layer, record.kind) == ("first", "forward.share")


def _assert_shares_are_in(content, shares):
    """Otherwise it would be no wonder that nothing else is found. The share of the last call is still kept."""
    for row in shares[-1]:
        assert row.numpy().tobytes() in content, "the share that the worker keeps is not in what was read of its memory"


def _bytes(records):
    return b"".join(record.tensor.contiguous().numpy().tobytes() for record in records)


def _layers(records, private):
    """The best correlation of a whole share with the best mix of what went into it, for every layer and kind."""
    best, tests = defaultdict(float), defaultdict(int)
    for record in records:
        key = record.layer, record.kind
        for truth in private.get(key, ()):
            sources = virtual_batches(truth, 2).transpose(0, 1).flatten(1).double()
            best[key] = max(best[key], _multiple_correlation(_plain(record.tensor).flatten(), sources))
            tests[key] += 1
    numbers = {key: truths[0].numel() // 2 for key, truths in private.items()}
    return {key: (best[key], _by_chance(tests[key], numbers[key])) for key in best}


def _plain(share):
    if share.is_floating_point():
        return share.double()
    return torch.where(share > PRIME_28 // 2, share - PRIME_28, share).double()


def _multiple_correlation(share, sources):
    share, sources = share - share.mean(), sources - sources.mean(1, keepdim=True)
    if not share.any():  # a carrier of noise, without noise
        return 0.0
    basis = torch.linalg.qr(sources.T).Q
    return float((basis.T @ share).norm() / share.norm())


def _by_chance(tests, numbers):
    """What noise exceeds once in a million times `tests`: it exceeds R with two sources at (1 - R^2)^((n - 3) / 2)."""
    return math.sqrt(1 - (1e-6 / tests) ** (2 / (numbers - 3)))


# --- the tests --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", SCHEMES)
def test_nothing_of_masked_images_is_in_a_workers_memory(name, cases, capsys):
    sights = cases(name).memory
    with capsys.disabled():
        worker = max(sights, key=lambda worker: sights[worker].used.mixed)
        print(f"\nmemory of worker {worker}, worst of {len(sights)}, {name}, masked: {sights[worker]}", end="")
    for sight in sights.values():
        sight.assert_at_the_floor(MARGIN)


@pytest.mark.parametrize(
    ("name", "statistic", "least"),
    [
        ("systematic", "alone", FOUND),
        ("systematic", "exact", 1),
        ("dense", "exact", 1),
        ("real", "mixed", FOUND),
    ],
)
def test_images_without_noise_are_found_in_a_workers_memory(name, statistic, least, cases, capsys):
    """Unmasked: a share of the systematic code is then the image itself. Mixed without noise: the dense code."""
    sight = cases(name, noise=False).memory[0]
    with capsys.disabled():
        print(f"\nmemory of worker 0, {name}, no noise: {sight}", end="")
    assert getattr(sight.used, statistic) >= least
    assert getattr(sight.unused, statistic) < least


@pytest.mark.parametrize("name", SCHEMES)
def test_nothing_of_masked_images_is_in_what_a_reader_saw(name, cases, capsys):
    sights = cases(name).reader
    with capsys.disabled():
        worker = max(sights, key=lambda worker: sights[worker].used.mixed)
        print(f"\nreader of worker {worker}, worst of {len(sights)}, {name}, masked: {sights[worker]}", end="")
    for sight in sights.values():
        sight.assert_at_the_floor(MARGIN)


@pytest.mark.parametrize(
    ("name", "statistic", "least"),
    [
        ("systematic", "alone", FOUND),
        ("systematic", "exact", 1),
        ("dense", "exact", 1),
        ("real", "mixed", FOUND),
    ],
)
def test_images_without_noise_are_found_in_what_a_reader_saw(name, statistic, least, cases):
    """By every worker of the dense code; with the systematic code by those that carry data."""
    for worker in range(2 if name == "systematic" else 4):
        sight = cases(name, noise=False).reader[worker]
        assert getattr(sight.used, statistic) >= least, f"worker {worker}: {sight}"
        assert getattr(sight.unused, statistic) < least, f"worker {worker}: {sight}"


@pytest.mark.parametrize("name", SCHEMES)
def test_masked_inputs_and_gradients_of_every_layer_look_like_noise(name, cases, capsys):
    layers = cases(name).layers
    with capsys.disabled():
        words = (f"{' '.join(key)} {found:.3f} of {chance:.3f}" for key, (found, chance) in layers.items())
        print(f"\nlayers, {name}, correlation and what chance allows: {'; '.join(words)}", end="")
    assert len(layers) == 6
    for key, (found, chance) in layers.items():
        assert found < chance < FOUND, key


@pytest.mark.parametrize("name", ["systematic", "real"])
def test_inputs_and_gradients_of_every_layer_are_found_without_noise(name, cases):
    layers = cases(name, noise=False).layers
    assert len(layers) == 6
    for key, (found, _) in layers.items():
        assert found > FOUND, key


# --- a worker that an operator started, over TLS ----------------------------------------------------------------------
def test_the_memory_of_a_worker_that_is_reached_over_tls(tmp_path, capsys):
    """Its tensors come in pieces through gRPC's buffers, which lie anywhere. The other seats are the enclave's own."""
    with real_workers(tmp_path, {"north": {"cold": True}}) as (worker,):
        memory = _memory(worker.process.pid)
        entries = [worker.entry, *(_entry_of_nobody(operator) for operator in ("south", "east", "west"))]
        (tmp_path / "fleet.toml").write_text("\n".join(entries))
        with connect(tmp_path / "fleet.toml", patience=60) as fleet, pytest.MonkeyPatch.context() as patch:
            sent, ask = [], fleet.ask

            def spy(worker, task, expected):
                if isinstance(task, ForwardTask) and task.layer == "first":
                    sent.append(task.tensor)
                return ask(worker, task, expected)

            patch.setattr(fleet, "ask", spy)
            images, others, plain = (smooth_images(IMAGES, seed=200 + number) for number in range(3))
            with half_a_step(fleet, SCHEMES["systematic"], images):
                masked = memory.new_content()
                _assert_shares_are_in(masked, sent)
            with no_noise(), half_a_step(fleet, SCHEMES["systematic"], plain):
                unmasked = memory.new_content()
    masked = look(masked, images, others, every_byte=True)
    unmasked = look(unmasked, plain, others)
    with capsys.disabled():
        print(f"\nmemory of a worker behind TLS, masked: {masked}; no noise: {unmasked}", end="")
    masked.assert_at_the_floor(MARGIN)
    assert unmasked.used.alone > FOUND
    assert unmasked.used.exact > 0


def _entry_of_nobody(operator):
    certificate = Identity.create(WORKER).certificate.decode()
    address = f"127.0.0.1:{free_port()}"
    return f"[[worker]]\naddress = '{address}'\noperator = '{operator}'\ncertificate = '''{certificate}'''\n"
