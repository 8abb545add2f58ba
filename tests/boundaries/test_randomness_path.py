"""All randomness of the trusted rooms comes from darknight.randomness, which alone may ask the operating system.

A mask drawn from torch's, numpy's or Python's generators would be predictable, and no statistical test would show it.
So the source is searched for them. This finds accidents, not somebody who hides a call on purpose.
"""

import ast

import pytest

from boundaries.house import Source, constant_text, sources
from boundaries.test_imports import TABLE

# Rooms that make no masks and may draw ordinary random numbers (initial weights, shuffling, attacks, measurements).
FREE = {"models", "data", "train", "audit", "bench", "report", "cli", "worker"}

# Functions and modules below torch, at any depth: torch.rand, torch.ops.aten.rand, torch.cuda.manual_seed_all.
TORCH = {
    *("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "quasirandom"),
    *("normal", "bernoulli", "multinomial", "poisson", "binomial", "gumbel_softmax", "rrelu", "rrelu_"),
    *("Generator", "default_generator", "manual_seed", "manual_seed_all", "seed", "seed_all", "initial_seed"),
    *("random", "fork_rng", "get_rng_state", "set_rng_state", "distributions"),
}

# Methods of tensors and generators, whatever they are called on.
METHODS = {
    *("random_", "normal_", "uniform_", "bernoulli_", "exponential_", "geometric_", "log_normal_", "cauchy_"),
    *("bernoulli", "multinomial", "manual_seed"),
}

MODULES = {"random", "uuid", "numpy.random", "torch.nn.init"}
SYSTEM = {"secrets", "os.urandom", "os.getrandom", "ssl.RAND_bytes"}  # for randomness/ only
# May call secrets: what proves who is at a door, and keys that are agreed with an enclave or a worker, mask nothing.
TOKENS = {"darknight.wire.handshake", "darknight.wire.pipe", "darknight.trust.fresh"}
STARS = {"torch.*", "torch.nn.*", "torch.nn.functional.*", "numpy.*", "os.*"}


def below(name: str, roots: set[str]) -> bool:
    return any(name == root or name.startswith(f"{root}.") for root in roots)


def refused(name: str, source: Source) -> bool:
    """Is this full dotted name a generator that ``source`` may not use?"""
    top, *rest = name.split(".")
    if below(name, MODULES) or name in STARS:
        return True
    if below(name, SYSTEM):
        return source.room != "randomness" and not (source.module in TOKENS and below(name, {"secrets"}))
    return top == "torch" and any(part in TORCH or "dropout" in part.lower() for part in rest)


def violations(source: Source) -> list[str]:
    if source.room in FREE:
        return []
    found = {(entry.line, entry.target) for entry in source.imports if refused(entry.target, source)}
    for node in ast.walk(source.tree):
        attribute = None
        if isinstance(node, ast.Attribute):
            attribute = node.attr
        elif isinstance(node, ast.Call) and len(node.args) >= 1:
            functions = source.meanings_of(node.func)
            if "builtins.getattr" in functions and len(node.args) >= 2:
                attribute = constant_text(node.args[1])
            elif functions & {"operator.attrgetter", "operator.methodcaller"}:
                attribute = constant_text(node.args[0])
        if attribute in METHODS:
            found.add((node.lineno, f".{attribute}"))
        if isinstance(node, ast.Name | ast.Attribute | ast.Call):
            found |= {(node.lineno, name) for name in source.meanings_of(node) if refused(name, source)}
    return [f"{source.module}:{line}: {name}; draw from darknight.randomness instead" for line, name in sorted(found)]


@pytest.mark.parametrize("source", sources(), ids=lambda source: source.module)
def test_no_trusted_file_uses_another_generator(source):
    assert not violations(source), "\n".join(violations(source))


def test_the_free_rooms_are_rooms():
    assert TABLE.keys() >= FREE
    assert not FREE & {"kernels", "randomness", "coding", "integrity", "runtime", "accounting", "fleet", "nn"}


# The checker can fail: each of these uses a generator that is not ours.
VIOLATIONS = [
    *(f"import torch\ntorch.{name}(3)" for name in sorted(TORCH)),
    *(f"def f(x):\n    return x.{name}(0.5)" for name in sorted(METHODS)),
    "import torch as t\nt.randn(3)",
    "from torch import randn as z\nz(3)",
    "from torch import randn",
    "from torch import *",
    "import torch\nt = torch\nt.rand(3)",
    "import torch\ndraw = torch.rand",
    "import torch\ngetattr(torch, 'randn')(3)",
    "import torch\ng = getattr\ng(torch, 'rand' 'n')(3)",
    "import torch\ngetattr(torch.zeros(3), 'uniform_')()",
    "import operator\noperator.methodcaller('normal_')",
    "import torch\ntorch.ops.aten.rand.default([3])",
    "import torch\ntorch.cuda.manual_seed_all(0)",
    "import torch\ntorch.Tensor.random_",
    "import torch\ndef f(generator: torch.Generator): ...",
    "import torch\ntorch.nn.init.zeros_(x)",
    "from torch.nn import init",
    "import torch.nn as nn\nnn.init",
    "from torch.nn.init import xavier_uniform_",
    "import torch.distributions",
    "from torch.distributions import Normal",
    "import torch.nn.functional as F\nF.dropout(x)",
    "import torch\ntorch.nn.functional.alpha_dropout(x)",
    "from torch import nn\nnn.Dropout(0.1)",
    "import torch\ntorch.dropout(x, 0.5, True)",
    "import numpy\nnumpy.random.default_rng()",
    "import numpy as np\nnp.random.rand(3)",
    "from numpy import random",
    "from numpy.random import default_rng",
    "import numpy.random as r",
    "import random",
    "import random as r",
    "from random import SystemRandom",
    "def f():\n    import random",
    "import importlib\nimportlib.import_module('random')",
    "__import__('numpy.random')",
    "import uuid",
    "from uuid import uuid4",
]
SYSTEM_VIOLATIONS = [
    "import secrets",
    "from secrets import token_bytes",
    "import os\nos.urandom(16)",
    "import os as o\no.getrandom(16)",
    "from os import urandom as u",
    "import os\ngetattr(os, 'urandom')(16)",
    "import ssl\nssl.RAND_bytes(16)",
]


@pytest.mark.parametrize("text", VIOLATIONS)
def test_another_generator_is_found(text):
    for room in ("kernels", "randomness", "coding", "integrity", "runtime", "accounting", "fleet", "nn"):
        assert violations(Source(f"darknight.{room}.file", text)), room
    assert not violations(Source("darknight.train.file", text))


@pytest.mark.parametrize("text", SYSTEM_VIOLATIONS)
def test_only_the_randomness_room_asks_the_operating_system(text):
    assert violations(Source("darknight.coding.file", text))
    assert not violations(Source("darknight.randomness.file", text))


@pytest.mark.parametrize(
    "text",
    [
        "from darknight.randomness import Stream\ndef f(stream: Stream): return stream.uniform(3), stream.normal(3)",
        "import torch\ntorch.einsum('a,b->ab', x, y).add_(torch.zeros(3))",
        "import os\nos.path.join('a', 'b')",
        "from . import random\nfrom .random import draw",
        "def f(rand, normal): return rand + normal",
        "import numpy as np\nnp.linalg.det(x)",
    ],
)
def test_ordinary_code_is_accepted(text):
    assert not violations(Source("darknight.coding.file", text))
