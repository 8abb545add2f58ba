"""Who may import whom. The table is the design of the house; a change to it is a change of the design."""

import pytest

from boundaries.house import Source, sources

EVERYTHING_BUT_CLI = "everything but cli"
EVERYTHING = "everything"

# room -> what of ours it may import, besides itself, errors and types. "coding.scheme" means that module and nothing
# else of its room.
TABLE: dict[str, set[str] | str] = {
    "errors": set(),
    "types": set(),
    "memory": set(),
    "kernels": set(),
    "randomness": {"kernels"},
    "coding": {"kernels", "randomness"},
    "ops": set(),
    "accounting": {"coding"},
    "integrity": {"kernels", "coding", "randomness", "ops"},
    "wire": {"memory"},
    "worker": {"ops", "wire", "memory"},  # never a trusted room
    "fleet": {"wire", "coding.scheme", "coding.Scheme"},  # workers are programs: started by name, never imported
    "runtime": {"coding", "randomness", "accounting", "integrity", "ops", "fleet", "memory"},
    "nn": {"kernels", "runtime", "ops"},
    "models": set(),
    "data": set(),
    "train": {"nn", "runtime", "models", "data"},
    "plan": {"coding", "accounting", "ops", "models"},
    "trust": set(),
    # a job names its scheme; coding itself is the runtime's (ADR 14)
    "service": {"trust", "train", "runtime", "fleet", "models", "data", "wire", "coding.scheme", "coding.arithmetic"},
    "client": {"trust", "data", "wire"},
    "audit": EVERYTHING_BUT_CLI,
    "bench": EVERYTHING_BUT_CLI,
    "report": EVERYTHING_BUT_CLI,
    "cli": EVERYTHING,
    "__init__": EVERYTHING_BUT_CLI,  # resolves the public names on first use
}

FOUNDATIONS = {"errors", "types"}  # open to every other room, closed themselves


def allowed(room: str, target: str) -> bool:
    """May ``room`` import ``target``, a dotted name below darknight such as coding.scheme.Scheme?"""
    other, row = target.split(".")[0], TABLE[room]
    if other == room:
        return True
    if room in FOUNDATIONS:
        return False
    if other in FOUNDATIONS or row == EVERYTHING:
        return True
    if row == EVERYTHING_BUT_CLI:
        return other != "cli"
    return any(target == entry or target.startswith(f"{entry}.") for entry in row)


def violations(source: Source) -> list[str]:
    if source.room not in TABLE:
        return [f"{source.module}: room {source.room!r} is unknown; add it to TABLE, with what it may import"]
    found = []
    for entry in source.imports:
        where = f"{source.module}:{entry.line}"
        top, _, target = entry.target.partition(".")
        if entry.unreadable and source.room != "__init__":
            found.append(f"{where}: imports a module whose name is not a constant; nobody can check that")
        if top != "darknight" or source.room == "__init__":
            continue
        if (
            entry.dynamic and source.module != "darknight.cli.app"
        ):  # which loads the command that was asked for, and no other
            found.append(f"{where}: imports {entry.target} by calling a function; use an import statement")
        if entry.lazy:
            found.append(f"{where}: imports {entry.target} inside a function; import it at the top of the file")
        if entry.binds == "darknight":
            found.append(f"{where}: binds the whole package, which opens every room; import from the room itself")
        elif target == "__version__":
            continue
        elif target.split(".")[0] not in TABLE:
            found.append(f"{where}: {entry.target} is in no known room; import from its room, or add the room to TABLE")
        elif not allowed(source.room, target):
            found.append(f"{where}: {source.room} may not import {entry.target}")
    if source.room == "__init__":
        found += [
            f"{source.module}:{entry.line}: nobody imports cli"
            for entry in source.imports
            if f"{entry.target}.".startswith("darknight.cli.")
        ]
    return found


@pytest.mark.parametrize("source", sources(), ids=lambda source: source.module)
def test_every_file_keeps_to_the_table(source):
    assert not violations(source), "\n".join(violations(source))


def reachable(room: str) -> set[str]:
    row = TABLE[room]
    assert isinstance(row, set)
    direct = {entry.split(".")[0] for entry in row}
    return direct.union(*(reachable(other) for other in direct))


def test_the_table_itself_keeps_the_worker_apart_and_has_no_cycles():
    assert reachable("worker") == {"ops", "wire", "memory"}
    for room, row in TABLE.items():
        if isinstance(row, set):
            assert room not in reachable(room)  # a longer cycle does not end: RecursionError
            assert {entry.split(".")[0] for entry in row} <= TABLE.keys() - {"cli"}


# The checker can fail: each of these breaks one rule.
@pytest.mark.parametrize(
    ("module", "text", "complaint"),
    [
        ("errors", "from darknight.types import Share", "errors may not import darknight.types.Share"),
        ("types", "from darknight import errors", "types may not import darknight.errors"),
        ("kernels.reference", "import darknight.coding.scheme as s", "kernels may not import"),
        ("randomness.aes", "from darknight.coding import encode", "randomness may not import"),
        ("coding.encode", "from ..ops import linear", "coding may not import darknight.ops.linear"),
        ("coding.encode", "from .. import ops", "coding may not import darknight.ops"),
        ("ops.linear", "from darknight.kernels import reduce", "ops may not import"),
        ("accounting.ledger", "from darknight.randomness import Stream", "accounting may not import"),
        ("integrity.freivalds", "from darknight.runtime import Runtime", "integrity may not import"),
        ("wire.messages", "from darknight.coding import Scheme", "wire may not import"),
        ("worker.serve", "from darknight.coding.scheme import Scheme", "worker may not import"),
        ("worker.serve", "from darknight.randomness import Stream", "worker may not import"),
        ("fleet.dispatch", "from darknight.coding import encode", "fleet may not import darknight.coding.encode"),
        ("fleet.dispatch", "from darknight.coding.schemes import f", "fleet may not import"),
        ("fleet.dispatch", "from darknight import coding", "fleet may not import darknight.coding"),
        ("fleet.dispatch", "from darknight.coding import *", "fleet may not import"),
        ("runtime.call", "from darknight.wire import messages", "runtime may not import"),
        ("nn.protect", "from darknight.coding import Scheme", "nn may not import"),
        ("models.vgg", "from darknight.nn import protect_", "models may not import"),
        ("data.mnist", "from darknight.models import vgg", "data may not import"),
        ("train.loop", "from darknight.coding import Scheme", "train may not import"),
        ("plan.choose", "from darknight.runtime import Runtime", "plan may not import"),
        ("trust.quote", "from darknight.wire import messages", "trust may not import"),
        ("service.jobs", "from darknight.coding import encode", "service may not import"),
        ("client.seal", "from darknight.runtime import Runtime", "client may not import"),
        ("audit.attack", "from darknight.cli import main", "audit may not import darknight.cli.main"),
        ("bench.run", "from darknight import cli", "bench may not import darknight.cli"),
        ("report.page", "import darknight.cli.main as m", "report may not import darknight.cli.main"),
        ("coding.encode", "if TYPE_CHECKING:\n    from darknight.ops import linear", "coding may not import"),
        ("coding.encode", "def f():\n    from darknight.kernels import reduce", "inside a function"),
        ("coding.encode", "class C:\n    async def f(self):\n        from . import scheme", "inside a function"),
        ("coding.encode", "def __getattr__(name):\n    import darknight.errors as e", "inside a function"),
        ("coding.encode", "import importlib\nimportlib.import_module('darknight.kernels')", "by calling a function"),
        ("coding.encode", "from importlib import import_module as f\nf('.x', 'darknight')", "by calling a function"),
        ("coding.encode", "import importlib as i\nf = i.import_module\nf(name='darknight.x')", "by calling a function"),
        ("coding.encode", "import importlib as i\ngetattr(i, 'import_module')('darknight')", "by calling a function"),
        ("coding.encode", "__import__('darknight.ops')", "by calling a function"),
        ("coding.encode", "import builtins\nbuiltins.__import__('darknight.ops')", "by calling a function"),
        ("coding.encode", "__import__(f'dark{x}')", "not a constant"),
        ("worker.serve", "import darknight", "binds the whole package"),
        ("worker.serve", "import darknight.wire", "binds the whole package"),
        ("worker.serve", "from darknight import Scheme", "in no known room"),
        ("worker.serve", "from darknight import *", "in no known room"),
        ("coding.encode", "from darknight.helpers import f", "in no known room"),
        ("helpers.f", "", "add it to TABLE"),
    ],
)
def test_a_violation_is_found(module, text, complaint):
    found = violations(Source(f"darknight.{module}", text))
    assert any(complaint in line for line in found), found


def test_relative_imports_of_a_package_file_start_at_the_package():
    assert not violations(Source("darknight.coding", "from .scheme import Scheme", is_package=True))
    assert violations(Source("darknight.coding", "from ..ops import linear", is_package=True))


def test_the_package_root_may_not_import_cli():
    assert violations(Source("darknight", "def f():\n    from darknight.cli import main", is_package=True))


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("coding.encode", "from darknight.kernels.reference import reduce\nfrom darknight.errors import SchemeError"),
        ("coding.encode", "from . import scheme\nfrom .scheme import Scheme\nfrom ..types import Share"),
        ("coding.encode", "def f():\n    import math\n    from torch import einsum"),
        ("fleet.dispatch", "from darknight.coding.scheme import Scheme\nfrom darknight.coding import scheme"),
        ("fleet.dispatch", "from darknight.coding import Scheme\nimport darknight.coding.scheme as s"),
        ("worker.serve", "from darknight.ops import linear\nfrom darknight import wire, __version__"),
        ("audit.attack", "from darknight.runtime import Runtime\nfrom darknight.bench import run"),
        ("cli.main", "from darknight.audit import attack\nimport importlib\nimportlib.import_module('ray')"),
    ],
)
def test_what_the_table_grants_is_accepted(module, text):
    assert not violations(Source(f"darknight.{module}", text))
