"""Files of experiments as the scripts write them, with numbers that nobody measured."""

import copy

from darknight.report.experiment_file import Experiment
from darknight.report.our_features import OURS

MACHINE = {"processor": "a processor", "cores": 2, "memory_gib": 24, "system": "Linux x86_64"}
PROGRAM = {"version": "0.1.0", "commit": None, "torch": "2", "python": "3.11", "compiled_kernels": True}
SCHEMES = {"clear": "nothing", "field": "a field", "real": "noise"}
NOISES = {
    "clear": None,
    "field": None,
    "N(4e3, 1.6e7)": {"mean": 4e3, "variance": 1.6e7},
    "N(0, 4e8)": {"mean": 0.0, "variance": 4e8},
}
MODELS = ("vgg-small", "resnet-small", "mobilenet-small")
TRAINED = {
    "data": "CIFAR-10, a slice",
    "train_examples": 512,
    "test_examples": 500,
    "image": [3, 32, 32],
    "classes": 10,
    "epochs": 3,
    "batch_size": 32,
    "seed": 0,
    "schemes": SCHEMES,
}


def experiment(name, scale, cells, planned=None):
    return Experiment(
        name=name,
        command=f"python experiments/{name}.py --out results/{name}.json",
        scale=scale,
        machine=MACHINE,
        program=PROGRAM,
        planned=tuple(planned or cells),
        cells=cells,
    )


def accuracy():
    """One cell is missing, and one training stopped after its first epoch."""
    cells = {
        f"{model}/{setting}": {
            "model": model,
            "setting": setting,
            "noise": noise,
            "mmacs": 9.9,
            "epochs": [{"loss": 2.3 - 0.2 * epoch, "accuracy": 0.1 + 0.07 * epoch} for epoch in range(3)],
            "stopped": None,
            "seconds": 12.5,
        }
        for model in MODELS
        for setting, noise in NOISES.items()
    }
    planned = list(cells)
    del cells["mobilenet-small/N(0, 4e8)"]
    stopped = cells["resnet-small/N(0, 4e8)"]
    stopped["epochs"], stopped["stopped"] = stopped["epochs"][:1], "the loss is no longer a finite number"
    return experiment("accuracy", {**TRAINED, "learning_rate": 0.05, "schedule": "one-cycle"}, cells, planned)


def inference():
    cells = {
        f"{model}/{setting}": {
            "model": model,
            "setting": setting,
            "noise": noise,
            "top1": 0.61,
            "top5": 0.95,
            "agreement": 1.0 if noise is None else 0.97,
            "leakage": None if setting == "clear" else {"theorem": 2.5e-8, "dense": 5e-9, "systematic": 1.25e-9},
            "stopped": None,
        }
        for model in MODELS
        for setting, noise in NOISES.items()
    }
    return experiment("inference", TRAINED, cells)


def time_split():
    cell = {
        "model": "mobilenet-v2",
        "batch": 8,
        "plain": {"linear": 0.6, "non_linear": 0.4},
        "enclave": {"masking": 0.3, "checking": 0.1, "links": 0.1, "staying": 0.3, "optimizer": 0.02},
        "workers": 9.5,
        "wall": 7.0,
        "ceiling": 1.22,
        "masked_layers": 36,
        "phases": [{"name": "encode", "share": 0.4}, {"name": "decode", "share": 0.6}],
    }
    scale = {"size": 224, "times": 3, "scheme": "field", "links": "shm", "place": "structure"}
    return experiment("time-split", scale, {"mobilenet-v2": cell}, ["vgg16", "mobilenet-v2"])


def features():
    cells = {
        name: {"feature": name, "tests": list(feature.tests), "outcomes": ["passed"] * len(feature.tests)}
        for name, feature in OURS.items()
    }
    return experiment("features", {"full": False}, cells)


def scaling():
    cells = {}
    for arithmetic in ("field", "real"):
        for sweep, values in {"inputs": (1, 2, 3), "colluders": (1, 2), "batch": (4, 8)}.items():
            for value in values:
                found = {"inputs": 2, "colluders": 1, "batch": 6, sweep: value}
                cells[f"{arithmetic}/{sweep}={value}"] = {
                    "sweep": sweep,
                    "arithmetic": arithmetic,
                    **found,
                    "workers": found["inputs"] + 2 * found["colluders"],
                    "virtual_batches": -(-found["batch"] // found["inputs"]),
                    "enclave": 3.0 + value,
                    "all_workers": 9.0,
                    "sent_bytes": 1_000_000,
                    "received_bytes": 900_000,
                    "input_bytes": 12_288,
                    "forward_error": 8e-3,
                    "gradient_error": 3e-2,
                }
    scale = {"model": "vgg-small", "image": [3, 32, 32], "batch_size": 6, "rounds": 3, "seed": 0, "noise_std": 2e4}
    return experiment("scaling", scale, cells)


def everything():
    return {made.name: made for made in (accuracy(), inference(), time_split(), features(), scaling())}


def leaves(value, path=()):
    """Every place of a JSON value, those of objects and lists too."""
    yield path
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in entries:
        yield from leaves(entry, (*path, key))


def changed(words, path, value):
    words = copy.deepcopy(words)
    if not path:
        return value
    place = words
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return words
