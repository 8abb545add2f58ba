"""What overlapping saves: a layer call in chunks over the same call in one piece, in one run.

First a simulation: workers are threads that wait as long as an accelerator would take for its task, and answer zeros.
So the two cores of a small machine are the enclave's alone, as they are where workers are elsewhere. Nothing is right
that comes of it; so the check is done, and what it finds is not looked at. The waiting of a call in one piece is given
in times of what the enclave itself needs for it.

Then real worker processes, which share this machine's cores with the enclave: seconds of the enclave's processor.

    OMP_NUM_THREADS=1 python benchmarks/overlap.py
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from unittest import mock

import torch
from torch import nn

import darknight as dk
from darknight.fleet import Fleet, Member
from darknight.integrity import freivalds
from darknight.runtime import chunks
from darknight.types import Answer, BackwardTask, ForwardTask, Pass
from darknight.wire import in_process
from darknight.worker import Executor, serve

LAYERS = {  # channels in and out, size of the picture, batch
    "64 -> 64, 112 x 112, batch 32": (64, 64, 112, 32),
    "64 -> 128, 56 x 56, batch 32": (64, 128, 56, 32),
}
TIMES = 3
WAITS = (0.5, 1.0, 2.0)
SCHEME = dk.Scheme(inputs=4, colluders=1)


class Waiting(Executor):
    """Answers zeros after `pace` seconds for every number of its share; twice that where there are two results."""

    pace = 0.0

    def handle(self, message):  # type: ignore[no-untyped-def]
        if not isinstance(message, ForwardTask | BackwardTask):
            return super().handle(message)
        kept = self._lookup(message)
        if isinstance(message, ForwardTask):
            shape = kept.op.output_shape(tuple(message.tensor.shape), tuple(kept.weights.tensor.shape))
            shapes = {Pass.FORWARD: shape} if message.compute else {}
        else:
            forms = {Pass.GRAD_INPUT: message.x_shape, Pass.GRAD_WEIGHT: tuple(kept.weights.tensor.shape)}
            shapes = {kind: forms[kind] for kind in message.passes}
        time.sleep(Waiting.pace * message.tensor.numel() * len(shapes))
        tensors = {kind: zeros(shape) for kind, shape in shapes.items()}
        return Answer(layer=message.layer, call=message.call, tensors=tensors, seconds=0.0)


@cache
def zeros(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def waiting_fleet() -> Fleet:
    def member(number: int) -> Member:
        def dial():  # type: ignore[no-untyped-def]
            link, seat = in_process()
            threading.Thread(target=serve, args=(seat, Waiting()), daemon=True).start()
            return link

        return Member(f"waiting-{number}", f"simulated-{number}", dial)

    return Fleet([member(number) for number in range(SCHEME.workers)])


@contextmanager
def step_of(fleet: Fleet, form: tuple[int, int, int, int]) -> Iterator[Callable[[], None]]:
    """Forward and backward through one layer."""
    inputs, outputs, size, batch = form
    torch.manual_seed(0)
    layer = nn.Conv2d(inputs, outputs, 3, padding=1)
    x = torch.randn(batch, inputs, size, size, requires_grad=True)
    delta = torch.randn(batch, outputs, size, size)
    with dk.Runtime(SCHEME, fleet, seed=0) as runtime:
        dk.protect_(layer, runtime, where=lambda name, module: True)

        def step() -> None:
            x.grad = layer.weight.grad = layer.bias.grad = None
            layer(x).backward(delta)

        yield step


def in_turns(step: Callable[[], None], clock: Callable[[], float]) -> tuple[float, float]:
    """Medians: in one piece, in chunks."""
    found: dict[int, list[float]] = {1: [], chunks.MOST: []}
    for _ in range(TIMES):
        for most, times in found.items():
            with mock.patch.object(chunks, "MOST", most):
                begun = clock()
                step()
                times.append(clock() - begun)
    whole, cut = (statistics.median(times) for times in found.values())
    return whole, cut


def simulated(form: tuple[int, int, int, int]) -> None:
    inputs, outputs, size, batch = form
    numbers = (inputs + 2 * outputs) * size * size * -(-batch // SCHEME.inputs)  # of a worker's shares, as it waits
    with waiting_fleet() as fleet, step_of(fleet, form) as step, mock.patch.object(freivalds, "_judge"):
        Waiting.pace = 0.0
        step()
        own = in_turns(step, time.perf_counter)[0]
        for wait in WAITS:
            Waiting.pace = wait * own / numbers
            whole, cut = in_turns(step, time.perf_counter)
            best = max(1.0, wait) / (1.0 + wait)
            print(
                f"  workers wait {wait:3.1f} x {own:5.2f} s   one piece {whole:5.2f} s, chunks {cut:5.2f} s   "
                f"ratio {cut / whole:4.2f} (nobody waits in turn: {best:4.2f})"
            )


def measured(form: tuple[int, int, int, int]) -> None:
    with dk.local_fleet(SCHEME) as fleet, step_of(fleet, form) as step:
        step()
        whole, cut = in_turns(step, time.process_time)
    print(f"  enclave's processor      one piece {whole:5.2f} s, chunks {cut:5.2f} s   ratio {cut / whole:4.2f}")


def main() -> None:
    wanted = sys.argv[1:]
    for name, form in LAYERS.items():
        inputs, outputs, size, batch = form
        x, y = (batch, inputs, size, size), (batch, outputs, size, size)
        count = len(chunks.chunks(SCHEME, x, y, (outputs, inputs, 3, 3), 4))
        print(f"{name}, {count} chunks, K = {SCHEME.inputs}, M = {SCHEME.colluders}, Freivalds")
        if not wanted or "simulated" in wanted:
            simulated(form)
        if not wanted or "measured" in wanted:
            measured(form)


if __name__ == "__main__":
    main()
