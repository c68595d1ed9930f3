"""Formulas over columns: arithmetic, comparisons, conditions and functions, never Python's `eval`.

simpleeval walks the syntax tree; what is not listed here is refused before anything runs. All
operators work on whole columns (numpy), and NaN is a missing number.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from shoal.errors import ConfigError, unknown_name


def _carrying(function: Any) -> Any:
    """float64 of a function, 1.0 and 0.0 of a truth; NaN where an operand is missing."""

    def evaluate(*operands: Any) -> Any:
        missing = np.any(np.broadcast_arrays(*map(np.isnan, operands)), axis=0)
        return np.where(missing, np.nan, function(*operands))

    return evaluate


def _chosen(test: Any, body: Any, orelse: Any) -> Any:
    return np.where(np.isnan(test), np.nan, np.where(test, body, orelse))


_OPERATORS: dict[type[ast.AST], Any] = {
    ast.Add: np.add,
    ast.Sub: np.subtract,
    ast.Mult: np.multiply,
    ast.Div: np.divide,
    ast.FloorDiv: np.floor_divide,
    ast.Mod: np.mod,
    ast.Pow: _carrying(np.float_power),
    ast.USub: np.negative,
    ast.UAdd: np.positive,
    ast.Not: _carrying(np.logical_not),
    ast.Eq: _carrying(np.equal),
    ast.NotEq: _carrying(np.not_equal),
    ast.Lt: _carrying(np.less),
    ast.LtE: _carrying(np.less_equal),
    ast.Gt: _carrying(np.greater),
    ast.GtE: _carrying(np.greater_equal),
}
_AND, _OR = _carrying(np.logical_and), _carrying(np.logical_or)
_PLAIN = (
    "abs arccos arccosh arcsin arcsinh arctan arctanh ceil cos cosh exp floor log log10 log1p log2 "
    "rint sign sin sinh sqrt tan tanh trunc"
)
_FUNCTIONS: dict[str, Any] = {name: getattr(np, name) for name in _PLAIN.split()} | {
    "avg": lambda *parts: sum(parts) / len(parts),
    "clip": np.clip,
    "isnan": lambda x: np.isnan(x).astype(np.float64),
    "ln": np.log,
    "max": lambda first, *more: _folded(np.maximum, first, more),
    "min": lambda first, *more: _folded(np.minimum, first, more),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "sum": lambda *parts: sum(parts),
    "where": _chosen,
}
_CONSTANTS = {"pi": np.pi, "e": np.e, "nan": np.nan}
_ALLOWED = (ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.Call, ast.Name,
            ast.Constant, ast.Load, ast.And, ast.Or, *_OPERATORS)  # fmt: skip


def _folded(ufunc: Any, first: Any, more: Sequence[Any]) -> Any:
    for part in more:
        first = ufunc(first, part)
    return first


@dataclass(frozen=True, slots=True)
class Formula:
    """A formula as text.

    Raises:
        ConfigError: it is no formula, or uses what formulas do not have.
    """

    text: str

    def __post_init__(self) -> None:
        _parsed(self.text)

    @property
    def names(self) -> tuple[str, ...]:
        """Names in it that are neither functions nor constants, in order."""
        return _names(_parsed(self.text))

    def check(self, names: Sequence[str]) -> None:
        """Check that it can be evaluated with these variables, and with no others.

        Raises:
            UnknownName: it has a name that is neither a variable nor a function.
            ConfigError: a function with the wrong number of arguments, or no variables.
        """
        for name in self.names:
            if name not in names:
                known = [*names, *_FUNCTIONS, *_CONSTANTS]
                raise unknown_name(f"name in expression {self.text!r}", name, known)
        if not self.names:
            raise _refused(self.text, "no variables", "a formula of columns")
        found = self.evaluate({name: np.ones(2) for name in names})
        if found.shape not in ((), (2,)):
            raise _refused(self.text, f"shape {found.shape}", "one number of each example")

    def evaluate(self, variables: Mapping[str, Any]) -> Any:
        """float64 [N], of float64 [N] by name."""
        tree, evaluator = _parsed(self.text), _evaluator(variables)
        try:
            with np.errstate(all="ignore"):
                return np.asarray(evaluator.eval(self.text, previously_parsed=tree), np.float64)
        except (TypeError, ValueError, ArithmeticError, RecursionError) as error:
            raise _refused(self.text, error, "functions with their arguments") from error


@lru_cache(maxsize=1024)
def _parsed(text: str) -> ast.AST:
    import simpleeval  # type: ignore[import-untyped]

    try:
        tree: ast.AST = simpleeval.SimpleEval.parse(text)
        body = tree.value if isinstance(tree, ast.Expr) else tree
        for node in ast.walk(body):
            plain = not isinstance(node, ast.Constant) or type(node.value) in (int, float, bool)
            named = not isinstance(node, ast.Call) or isinstance(node.func, ast.Name)
            if not (isinstance(node, _ALLOWED) and plain and named):
                allowed = "numbers, columns, + - * / // % **, comparisons, and, or, not, if else, "
                raise _refused(text, type(node).__name__, f"{allowed}{', '.join(_FUNCTIONS)}")
            if isinstance(node, ast.Call) and node.func.id not in _FUNCTIONS:  # type: ignore[attr-defined]
                name = node.func.id  # type: ignore[attr-defined]
                raise unknown_name(f"function in expression {text!r}", name, _FUNCTIONS)
    except (simpleeval.InvalidExpression, SyntaxError, RecursionError, MemoryError) as error:
        raise _refused(text, str(error) or type(error).__name__, "a formula") from error
    return tree


def _names(tree: ast.AST) -> tuple[str, ...]:
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    found = (node for node in ast.walk(tree) if isinstance(node, ast.Name))
    names = [node.id for node in found if id(node) not in called and node.id not in _CONSTANTS]
    return tuple(dict.fromkeys(names))


def _evaluator(variables: Mapping[str, Any]) -> Any:
    import simpleeval

    made = simpleeval.SimpleEval(
        operators=_OPERATORS, functions=_FUNCTIONS, names={**_CONSTANTS, **variables}
    )

    def truth(node: Any) -> Any:
        join = _AND if isinstance(node.op, ast.And) else _OR
        parts = [made._eval(part) for part in node.values]
        return _folded(join, parts[0], parts[1:])

    def compare(node: Any) -> Any:
        sides = [made._eval(part) for part in (node.left, *node.comparators)]
        pairs = zip(node.ops, sides[:-1], sides[1:], strict=True)
        found = [_OPERATORS[type(op)](a, b) for op, a, b in pairs]
        return _folded(_AND, found[0], found[1:])

    def choose(node: Any) -> Any:
        return _chosen(*(made._eval(part) for part in (node.test, node.body, node.orelse)))

    # Python's own take one truth value of a column; sums of booleans would be truths.
    made.nodes |= {ast.BoolOp: truth, ast.Compare: compare, ast.IfExp: choose}
    made.nodes[ast.Constant] = lambda node: float(node.value)
    return made


def _refused(text: str, got: object, allowed: str) -> ConfigError:
    remedy = "Correct it; docs/guide/features.md lists what a formula may hold."
    return ConfigError(f"expression {text!r}", got=got, allowed=allowed, remedy=remedy)
