"""One of two parties that train a network with CrypTen, run as a script by an interpreter that has CrypTen.

It prints a JSON object a line: first {"ready": version}, or {"missing": why}; then, for each line that it reads, what
one training step took and its loss. It ends with its standard input. Nothing of DarKnight is imported here, and
everything is CrypTen's default: arithmetic shares of 64 bits, multiplication triples from a trusted first party.

    python crypten_party.py arrays.npz average 0 1    # pooling, rank, threads
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from typing import Any

import numpy as np

LEARNING_RATE = 0.1
_CLASSES = 10


def main(arrays: str, pooling: str, rank: str, threads: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print is not an answer

    def say(answer: dict[str, object]) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    warnings.simplefilter("ignore")
    try:
        import torch
        from torch.onnx._internal.torchscript_exporter import registration

        # Where CrypTen 0.4.1 looks for it; torch has moved it since.
        sys.modules.setdefault("torch.onnx._internal.registration", registration)
        import crypten
    except ImportError as error:
        say({"missing": str(error)})
        return
    torch.set_num_threads(int(threads))
    given = {name: torch.from_numpy(value) for name, value in np.load(arrays).items()}
    if rank != "0":  # everything is the first party's secret; the second knows shapes
        given = {name: torch.zeros_like(value) for name, value in given.items()}
    crypten.init()
    layers = _layers(crypten.nn, pooling)
    _load(layers, given)
    model = crypten.nn.Sequential(*layers)
    model.train()
    model.encrypt(src=0)
    images = crypten.cryptensor(given["images"], src=0)
    targets = crypten.cryptensor(torch.nn.functional.one_hot(given["labels"], _CLASSES).float(), src=0)
    loss_of = crypten.nn.MSELoss()
    say({"ready": f"crypten {crypten.__version__}"})
    for _ in sys.stdin:
        begun, computed = time.perf_counter(), time.process_time()
        loss = loss_of(model(images), targets)
        model.zero_grad()
        loss.backward()
        model.update_parameters(LEARNING_RATE)
        took = {"seconds": time.perf_counter() - begun, "processor_seconds": time.process_time() - computed}
        say({**took, "result": [loss.get_plain_text().item()]})
    crypten.uninit()


def _layers(nn: Any, pooling: str) -> list[Any]:
    """Those of rival_networks.training_network, in the same order."""
    pool = {"average": nn.AvgPool2d, "max": nn.MaxPool2d}[pooling]
    return [
        nn.Conv2d(1, 16, 5),
        nn.ReLU(),
        pool(2),
        nn.Flatten(),
        nn.Linear(16 * 12 * 12, 100),
        nn.ReLU(),
        nn.Linear(100, _CLASSES),
    ]


def _load(layers: list[Any], given: dict[str, Any]) -> None:
    """Every parameter by its name in torch, such as 0.weight; one that is missing or of another shape raises."""
    for number, layer in enumerate(layers):
        for name, parameter in list(layer.named_parameters()):
            value = given[f"{number}.{name}"]
            if value.shape != parameter.shape:
                raise ValueError(f"{number}.{name} has another shape here")
            layer.set_parameter(name, value.clone().requires_grad_())


if __name__ == "__main__":
    main(*sys.argv[1:])
