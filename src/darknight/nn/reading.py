"""What a forward of somebody's own does, read from its source: steps in a known order, or nothing.

The source is believed only if it compiles to the very code that is run. Of Python, a small language is understood:

- `name = value` and `name += value` for local names, `return value`, and `if` and `else` around them;
- values: local names, constants, `self.name`, sums, `value if condition else value`, and calls of `self.name`, of some
  functions of torch and of some methods of a value;
- conditions: `self.name`, `self.name is None`, `self.name is not None`, and `not` before one.

Anything else, however harmless, is not read.
"""

from __future__ import annotations
import __future__

import ast
import inspect
from collections.abc import Mapping
from functools import lru_cache
from tokenize import TokenError
from types import CodeType, FunctionType
from typing import Any

import torch
import torch.nn.functional as F

from darknight.nn.steps import Call, Check, Condition, Constant, Decisions, Known, Method, Own, Path, Reading, Step, Sum

# Functions that look at their arguments alone, and not at who calls them.
_FUNCTIONS = frozenset(
    {torch.add, torch.relu, torch.flatten, torch.log_softmax, torch.softmax}
    | {F.relu, F.relu6, F.hardtanh, F.log_softmax, F.softmax}
    | {F.max_pool2d, F.avg_pool2d, F.adaptive_avg_pool2d}
)
_METHODS = frozenset({"flatten", "mean", "reshape", "size", "view"})
_MOST_PATHS = 16
_FUTURE = {getattr(__future__, name).compiler_flag for name in __future__.all_feature_names} - {inspect.CO_NESTED}


@lru_cache(maxsize=256)
def read(function: object) -> Reading | None:
    """What a forward does; None if that is not known."""
    definition = _definition(function.__code__) if isinstance(function, FunctionType) else None
    if definition is None or not isinstance(function, FunctionType):
        return None
    asked: dict[Decisions, Condition] = {}
    paths: dict[Decisions, Path] = {}
    pending: list[Decisions] = [()]
    while pending:
        decisions = pending.pop()
        try:
            paths[decisions] = _Reader(definition, function.__globals__, decisions).path()
        except _UndecidedError as open_:
            asked[decisions] = open_.condition
            pending += [(*decisions, True), (*decisions, False)]
        except _UnknownError:
            return None
        if len(paths) + len(pending) > _MOST_PATHS:
            return None
    return Reading(function, function.__code__, len(definition.args.args) - 1, asked, paths)


# --- the source -------------------------------------------------------------------------------------------------------
def _definition(code: CodeType) -> ast.FunctionDef | None:
    """The source of a function, if that is what was compiled."""
    try:
        source = inspect.getsource(code)
        # Indented lines need something above them; without their indentation they would have other strings.
        tree = ast.parse(f"if True:\n{source}" if source[:1].isspace() else source)
        body = tree.body[0].body if isinstance(tree.body[0], ast.If) else tree.body
        if len(body) != 1 or not isinstance(definition := body[0], ast.FunctionDef) or definition.decorator_list:
            return None
        plain = _compiled(tree, code, definition.name)
        # Python calls functions of what a file imports by other instructions than those of other global names.
        names = {node.id for node in ast.walk(definition) if isinstance(node, ast.Name)} - {*code.co_varnames}
        imports = [ast.Import([ast.alias(name) for name in sorted(names)])] if names else []
        importing = _compiled(ast.Module([*imports, *tree.body], []), code, definition.name)
    except (OSError, TypeError, IndexError, SyntaxError, TokenError, ValueError):
        return None
    same = any(_does_the_same(each, code) for each in (*plain, *importing))
    return definition if same else None


def _compiled(tree: ast.Module, like: CodeType, name: str) -> list[CodeType]:
    """What becomes of the function of that name."""
    flags = sum(flag for flag in _FUTURE if like.co_flags & flag)
    whole = compile(ast.fix_missing_locations(tree), like.co_filename, "exec", flags=flags, dont_inherit=True)
    return [each for each in whole.co_consts if isinstance(each, CodeType) and each.co_name == name]


_FIELDS = tuple(
    f"co_{name}"
    for name in ("code", "names", "varnames", "freevars", "cellvars", "argcount", "posonlyargcount", "kwonlyargcount")
)


def _does_the_same(first: CodeType, second: CodeType) -> bool:
    """Whether two functions are the same, wherever they stand. One with functions or cells of its own is none."""
    same = all(getattr(first, name) == getattr(second, name) for name in _FIELDS)
    same = same and (first.co_flags ^ second.co_flags) in (0, inspect.CO_NESTED)  # a class in a function
    # By their text, because 0.0 == -0.0 and 1 == True. That of a code object has its address in it.
    return same and repr(first.co_consts) == repr(second.co_consts)


# --- the language -----------------------------------------------------------------------------------------------------
class _UnknownError(Exception):
    """Something that is not in the language."""


class _UndecidedError(Exception):
    """Something is asked, and no answer was given to that."""

    def __init__(self, condition: Condition) -> None:
        super().__init__()
        self.condition = condition


class _Reader:
    """Reads a forward on the way that it goes if what it asks is answered by `decisions`."""

    def __init__(self, definition: ast.FunctionDef, names: Mapping[str, Any], decisions: Decisions) -> None:
        self._definition = definition
        self._globals = names
        self._decisions = list(decisions)
        arguments = definition.args
        rest = (arguments.posonlyargs, arguments.vararg, arguments.kwonlyargs, arguments.kwarg, arguments.defaults)
        if any(rest) or not arguments.args:
            raise _UnknownError
        self._self, *given = [argument.arg for argument in arguments.args]
        self._arguments = len(given)
        self._values = {name: number for number, name in enumerate(given)}
        used = [node for node in ast.walk(definition) if isinstance(node, ast.Name)]
        self._local = {self._self, *given} | {name.id for name in used if not isinstance(name.ctx, ast.Load)}
        self._steps: list[Step] = []

    def path(self) -> Path:
        returned = self._block(self._definition.body)
        if returned is None:
            raise _UnknownError
        return Path(self._arguments, tuple(self._steps), returned)

    def _step(self, step: Step) -> int:
        self._steps.append(step)
        return self._arguments + len(self._steps) - 1

    def _block(self, statements: list[ast.stmt]) -> int | None:
        """What is returned; None if it goes on behind them."""
        for statement in statements:
            match statement:
                case ast.Return(value=ast.expr() as value):
                    return self._value(value)
                case ast.If(test=test, body=body, orelse=rest):
                    returned = self._block(body if self._holds(test) else rest)
                    if returned is not None:
                        return returned
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    self._assign(name, self._value(value))
                case ast.AnnAssign(target=ast.Name(id=name), simple=1, value=ast.expr() as value):
                    self._assign(name, self._value(value))
                case ast.AugAssign(target=ast.Name(id=name), op=ast.Add(), value=value):
                    left = self._local_value(name)
                    self._assign(name, self._step(Sum(left, self._value(value), in_place=True)))
                case ast.Expr(value=ast.Constant(value=str())):  # what it says about itself
                    pass
                case _:
                    raise _UnknownError
        return None

    def _assign(self, name: str, value: int) -> None:
        if name == self._self:
            raise _UnknownError
        self._values[name] = value

    def _local_value(self, name: str) -> int:
        if name not in self._values:
            raise _UnknownError
        return self._values[name]

    def _value(self, node: ast.expr) -> int:
        match node:
            case ast.Name(id=name):
                return self._local_value(name)
            case ast.Constant(value=value) if value is None or type(value) in (bool, int, float, str):
                return self._step(Constant(value))
            case ast.Attribute(value=ast.Name(id=self._self), attr=name):
                return self._step(Own(name))
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                first = self._value(left)
                return self._step(Sum(first, self._value(right)))
            case ast.IfExp(test=test, body=body, orelse=rest):
                return self._value(body if self._holds(test) else rest)
            case ast.Call(func=function, args=given, keywords=named):
                return self._call(function, given, named)
        raise _UnknownError

    def _call(self, function: ast.expr, given: list[ast.expr], named: list[ast.keyword]) -> int:
        called = self._function(function)
        values = tuple(self._value(each) for each in given)
        if any(each.arg is None for each in named):
            raise _UnknownError
        by_name = tuple((str(each.arg), self._value(each.value)) for each in named)
        return self._step(Call(called, values, by_name))

    def _function(self, node: ast.expr) -> int:
        match node:
            case ast.Attribute(value=ast.Name(id=self._self), attr=name):
                return self._step(Own(name))
            case ast.Attribute(value=value, attr=method) if method in _METHODS and not self._is_global(value):
                return self._step(Method(self._value(value), method))
        known = Known(tuple(self._dotted(node)))
        function = known.found(self._globals)
        if not callable(function) or not any(function is each for each in _FUNCTIONS):
            raise _UnknownError
        return self._step(known)

    def _is_global(self, node: ast.expr) -> bool:
        while isinstance(node, ast.Attribute):
            node = node.value
        return isinstance(node, ast.Name) and node.id not in self._local

    def _dotted(self, node: ast.expr) -> list[str]:
        match node:
            case ast.Name(id=name) if name not in self._local:
                return [name]
            case ast.Attribute(value=value, attr=name):
                return [*self._dotted(value), name]
        raise _UnknownError

    def _holds(self, test: ast.expr) -> bool:
        """What is answered to this on this path."""
        match test:
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return not self._holds(operand)
            case ast.Compare(left=left, ops=[ast.Is() | ast.IsNot() as op], comparators=[ast.Constant(value=None)]):
                answer = self._answer(Condition(self._own(left), is_none=True))
                return answer if isinstance(op, ast.Is) else not answer
        return self._answer(Condition(self._own(test), is_none=False))

    def _own(self, node: ast.expr) -> str:
        match node:
            case ast.Attribute(value=ast.Name(id=self._self), attr=name):
                return name
        raise _UnknownError

    def _answer(self, condition: Condition) -> bool:
        if not self._decisions:
            raise _UndecidedError(condition)
        answer = self._decisions.pop(0)
        self._step(Check(condition, answer))
        return answer
