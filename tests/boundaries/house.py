"""Reading the source of DarKnight without running it: the room of a file, what it imports, what its names mean."""

import ast
import builtins
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "darknight"

# Functions that import the module whose name they are given.
IMPORTERS = {
    "builtins.__import__",
    "importlib.__import__",
    "importlib.import_module",
    "pkgutil.resolve_name",
    "runpy.run_module",
}


@dataclass(frozen=True)
class Import:
    """One imported thing: ``from a.b import c`` has the target ``a.b.c``."""

    target: str
    line: int
    lazy: bool = False  # inside a function
    dynamic: bool = False  # through a function such as importlib.import_module
    unreadable: bool = False  # dynamic, and its name is not a constant
    binds: str = ""  # the name that the statement defines


@dataclass(frozen=True)
class Source:
    """One module, as text. ``module`` is its full name: darknight.coding.scheme."""

    module: str
    text: str
    is_package: bool = False

    @classmethod
    def of(cls, path: Path) -> "Source":
        parts = ["darknight", *path.relative_to(PACKAGE).with_suffix("").parts]
        is_package = parts[-1] == "__init__"
        return cls(".".join(parts[:-1] if is_package else parts), path.read_text(encoding="utf-8"), is_package)

    @property
    def room(self) -> str:
        """darknight.coding.scheme -> coding; the package itself -> __init__."""
        return self.module.split(".")[1] if "." in self.module else "__init__"

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, filename=self.module)

    @cached_property
    def imports(self) -> list[Import]:
        return [*self._statements(self.tree, lazy=False), *self._calls()]

    @cached_property
    def meanings(self) -> dict[str, set[str]]:
        """What each name of the file may stand for, through imports (with ``as``) and plain assignments."""
        found: dict[str, set[str]] = defaultdict(set)
        for entry in self._statements(self.tree, lazy=False):
            # `import a.b` defines a; `import a.b as c` and `from a import b as c` define c as the whole.
            whole = entry.binds != entry.target.split(".")[0]
            found[entry.binds].add(entry.target if whole else entry.binds)
        assigned = [
            (target.id, node.value)
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value is not None
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
            if isinstance(target, ast.Name)
        ]
        for _ in range(5):  # chains of assignments; a bound, because `x = x.next` would grow for ever
            before = sum(map(len, found.values()))
            for name, value in assigned:
                if meanings := self._meanings_of(value, found):
                    found[name] |= meanings
            if sum(map(len, found.values())) == before:
                break
        return dict(found)

    def meanings_of(self, node: ast.expr) -> set[str]:
        """Full dotted names that an expression may stand for; empty where it is not a name."""
        return self._meanings_of(node, self.meanings)

    def _meanings_of(self, node: ast.expr, known: dict[str, set[str]]) -> set[str]:
        if isinstance(node, ast.Name):
            if node.id in known:
                return set(known[node.id])
            return {f"builtins.{node.id}"} if hasattr(builtins, node.id) else set()
        if isinstance(node, ast.Attribute):
            return {f"{base}.{node.attr}" for base in self._meanings_of(node.value, known)}
        if isinstance(node, ast.Call):
            functions = self._meanings_of(node.func, known)
            if "builtins.getattr" in functions and len(node.args) >= 2:
                name = constant_text(node.args[1])
                return {f"{base}.{name}" for base in self._meanings_of(node.args[0], known)} if name else set()
            if functions & IMPORTERS:
                name = _imported_name(node)
                return {name} if name else set()
        return set()

    def _statements(self, node: ast.AST, *, lazy: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, lazy, binds=alias.asname or alias.name.split(".")[0])
        elif isinstance(node, ast.ImportFrom):
            base = self._absolute(node)
            for alias in node.names:
                yield Import(f"{base}.{alias.name}", node.lineno, lazy, binds=alias.asname or alias.name)
        inside = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for child in ast.iter_child_nodes(node):
            yield from self._statements(child, lazy=inside)

    def _calls(self) -> Iterator[Import]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call) and self.meanings_of(node.func) & IMPORTERS:
                name = _imported_name(node)
                # A relative name can only be one of ours.
                target = f"{self.module}{name}" if name and name.startswith(".") else name or ""
                yield Import(target, node.lineno, dynamic=True, unreadable=name is None)

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        here = self.module.split(".") if self.is_package else self.module.split(".")[:-1]
        base = here[: len(here) - (node.level - 1)]
        return ".".join([*base, *([node.module] if node.module else [])])


def constant_text(node: ast.expr) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _imported_name(call: ast.Call) -> str | None:
    named = [keyword.value for keyword in call.keywords if keyword.arg in ("name", "mod_name")]
    first = [*call.args, *named][:1]
    return constant_text(first[0]) if first else None


def sources() -> list[Source]:
    return [Source.of(path) for path in sorted(PACKAGE.rglob("*.py"))]
