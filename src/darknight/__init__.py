"""DarKnight: train PyTorch models on accelerators that nobody has to trust.

A trusted machine (the enclave) holds the data. Before it sends a layer's inputs away it mixes them with fresh random
noise into *shares*, one per worker. Workers do the heavy bilinear work (convolutions, matrix products) on shares and
return the results; the enclave recombines them and the noise cancels. As long as no more than ``colluders`` workers
pool what they see, the shares tell them nothing about the data (exact arithmetic in a finite field), or at most a
stated number of nats (floating point, as in the paper).

The words
    inputs      K, private examples mixed in one virtual batch
    colluders   M, workers that may pool everything they see
    spares      E, extra workers for redundancy
    workers     P, how many workers a scheme needs

Choosing a scheme
    ``Scheme`` is frozen, keyword-only and checked at construction: a combination that is unsafe or impossible raises
    ``errors.SchemeError``, which says what to change. ::

        import darknight as dk

        scheme = dk.Scheme(inputs=4, colluders=1)   # exact field arithmetic, masked gradients: the defaults
        scheme.workers                              # how many workers that takes
        scheme.for_inference().workers              # fewer: no gradients to mask
        dk.Scheme.paper()                           # the published setting, with its leaks

    ``Field`` and ``Real`` are the two arithmetics a scheme can use.

Training
    ``protect_`` changes a model in place, so that its convolutions and matrix products go through a ``Runtime``;
    around it, an ordinary training loop. ::

        with dk.local_fleet(scheme) as fleet, dk.Runtime(scheme, fleet, seed=0) as runtime:
            report = dk.protect_(model, runtime)
            ...                                     # train as ever
            print(report)                           # layer by layer: masked, or in the enclave and why
            print(runtime.ledger)                   # leakage, checks, traffic, time
        dk.unprotect_(model)

    ``Runtime(scheme, None)`` does the same arithmetic without workers; with a field, the results are the same bits.

Errors
    Everything that DarKnight raises on purpose is in ``darknight.errors``, as one tree.

Workers
    ``local_fleet`` starts worker processes on this machine, for trying things out. In earnest, operators start workers
    with ``darknight worker``, a fleet file names them, and ``connect("fleet.toml")`` replaces ``local_fleet``. A worker
    that fails is replaced, or done without.

What is promised, and what is not, is in SECURITY.md.

Importing ``darknight`` loads nothing else of it: the names below are resolved when they are first used (PEP 562), so
that a worker, which must run without any trusted code, can live in the same package.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from darknight import errors
    from darknight.coding.arithmetic import Field, Real
    from darknight.coding.scheme import Scheme
    from darknight.fleet import connect, local_fleet
    from darknight.nn import protect_, unprotect_
    from darknight.runtime import Runtime

__version__ = "0.1.0"

__all__ = [
    "Field",
    "Real",
    "Runtime",
    "Scheme",
    "__version__",
    "connect",
    "errors",
    "local_fleet",
    "protect_",
    "unprotect_",
]

# Where each public name lives.
_HOMES = {
    "Field": "darknight.coding.arithmetic",
    "Real": "darknight.coding.arithmetic",
    "Runtime": "darknight.runtime",
    "Scheme": "darknight.coding.scheme",
    "connect": "darknight.fleet",
    "errors": "darknight.errors",
    "local_fleet": "darknight.fleet",
    "protect_": "darknight.nn",
    "unprotect_": "darknight.nn",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'darknight' has no attribute {name!r}; its public names are {', '.join(__all__)}")
    module = import_module(home)
    value: object = module if home == f"darknight.{name}" else getattr(module, name)
    globals()[name] = value  # resolved once; later uses do not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
