"""Requests for tests: small, not square, and with a batch that the inputs do not divide."""

from darknight.plan import Request

SHAPE = (3, 12, 8)
CLASSES = 5
BATCH = 7


def request(**changes):
    given = {
        "model": "resnet-small",
        "shape": SHAPE,
        "classes": CLASSES,
        "batch_size": BATCH,
        "examples": 45,
        "epochs": 2,
        "operators": tuple("abcdef"),
        "spares": 1,
        "max_inputs": 3,
        **changes,
    }
    if not given.get("training", True):
        given["epochs"] = 1
    return Request(**given)
