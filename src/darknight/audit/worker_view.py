"""What one worker receives for given images, recorded at the worker."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from darknight.coding import Scheme
from darknight.errors import DataError
from darknight.fleet import local_fleet
from darknight.nn import protect_at, unprotect_
from darknight.ops.place import WORKERS
from darknight.runtime import Runtime


@dataclass(frozen=True, eq=False)
class WorkerView:
    """The shares of the first layer that `worker` received, and for each an image that went into it.

    With the systematic code it is the only one; a share of the dense code mixes `inputs` images.
    """

    worker: int
    layer: str
    shares: Tensor
    images: Tensor


def record_worker_view(model: nn.Module, images: Tensor, scheme: Scheme, *, worker: int) -> WorkerView:
    """Send images through `model` on a recording fleet of this machine and return what `worker` saw of them.

    Every image is carried once by `worker`: there are `scheme.inputs` passes, each with the images moved on by one
    place. The model is left as it was.
    """
    inputs = scheme.inputs
    if not 0 <= worker < inputs:
        raise DataError(f"worker {worker} carries no images of its own; use one of 0 to {inputs - 1}.")
    images = images[: len(images) // inputs * inputs]
    if not len(images):
        raise DataError(f"fewer images than the {inputs} of one virtual batch. Give at least {inputs}.")
    carried = [images.roll(-turn, dims=0)[worker::inputs] for turn in range(inputs)]
    shares: list[Tensor] = []
    was_training = model.training
    with local_fleet(scheme, record=True) as fleet, Runtime(scheme, fleet) as runtime:
        protect_at(WORKERS, model, runtime, ())  # nothing stays for being cheap: workers see all that they can
        try:
            model.eval()
            with torch.no_grad():
                for turn in range(inputs):
                    model(images.roll(-turn, dims=0))
                    sent = [record for record in fleet.transcript(worker) if record.kind == "forward.share"]
                    layer = sent[0].layer
                    # The last one: a call that overflowed was repeated, with fresh noise.
                    shares.append([record.tensor for record in sent if record.layer == layer][-1])
        finally:
            unprotect_(model)
            model.train(was_training)
    return WorkerView(worker, layer, torch.cat(shares), torch.cat(carried))
