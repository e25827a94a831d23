"""Checks of a formula before formulaic, which evaluates Python, reads it.

formulaic evaluates every call in a formula as Python, with access to built-in functions, and some of it
while it reads the formula. A formula can come from a script's argument, so only what is listed here passes.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxlsgd.core import checks
from jaxlsgd.core.checks import refusal
from jaxlsgd.regression.options import MOST_FOR_NEWTON, memory

# Functions that formulaic lacks: the only names that it is given besides columns and its own.
CONTEXT: dict[str, Any] = {
    "abs": np.abs,
    "cos": np.cos,
    "expm1": np.expm1,
    "log1p": np.log1p,
    "sin": np.sin,
    "sqrt": np.sqrt,
}
FUNCTIONS = (
    *("log", "log2", "log10", "log1p", "exp", "expm1", "sqrt", "abs", "sin", "cos"),
    *("I", "C", "Treatment", "Sum", "poly", "bs", "cr", "cc", "center", "scale"),
)
_ALLOWED = f"columns, numbers, ~ + - * / : ** ( ) and the functions {', '.join(FUNCTIONS)}"
# Which arguments of a function make columns, by place and by name.
_SPLINE = (1, "df", 2, "knots")
_COLUMNS = {"poly": (1, "degree"), "bs": (*_SPLINE, 3, "degree"), "cr": _SPLINE, "cc": _SPLINE}
_MOST_COLUMNS = 100  # of one spline or polynomial
_MOST_CHARACTERS = 10_000
_MOST_TERMS = 10_000
_OPERATORS = frozenset("~+-*/:^")
_ARITHMETIC = (
    *(ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.BitAnd, ast.BitOr),
    *(ast.UAdd, ast.USub, ast.Invert, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq),
)


def columns_of(formula: Any) -> list[str]:
    """Return the columns that a formula names, sorted; refuse all that is not listed in `FUNCTIONS`."""
    from formulaic.parser.algos.tokenize import tokenize  # splits text, and evaluates nothing

    if not isinstance(formula, str):
        raise refusal("formula", "be text such as 'y ~ x'", formula, code="type")
    if len(formula) > _MOST_CHARACTERS:
        raise refusal("formula", f"have at most {_MOST_CHARACTERS:,} characters", len(formula))
    found: set[str] = set()
    for token in tokenize(formula):
        kind, text = token.kind.value if token.kind else "", token.token
        if kind == "name":
            found.add(text)
        elif kind == "python":
            found |= _called(text, braces=formula[token.source_start or 0] == "{")
        elif kind == "operator" and not (_OPERATORS.issuperset(text) or text == "in"):
            compares = not frozenset("<>=!").isdisjoint(text)
            raise _refused(
                text, "; comparisons stand in I(...), as in I(x > 3)" if compares else ""
            )
        elif kind == "context" and text in "[]":
            raise _refused(text)
        elif kind == "value" and not re.fullmatch(r"\d+(\.\d*)?|\.\d+", text, re.ASCII):
            raise _refused(text, "; name the columns one by one" if text == "." else "")
    return sorted(found)


def _refused(piece: str, hint: str = "") -> ValueError:
    return refusal("formula", f"be made of {_ALLOWED}", piece, hint)


def _called(text: str, braces: bool) -> set[str]:
    """Return the columns in a piece that formulaic evaluates as Python, such as log(dose)."""
    if braces:
        raise _refused(f"{{{text}}}", f"; arithmetic is I({checks.shown(text)[1:-1]})")
    quoted: list[str] = []

    def stand_in(match: re.Match[str]) -> str:
        quoted.append(match[1])
        return f" _column_{len(quoted) - 1}_ "

    # formulaic pastes names in backticks and texts into code of its own, which no quote may end.
    plain = re.sub(r"`([^`'\"\\]*)`", stand_in, text)
    if "`" in plain or "\\" in plain or "_formulaic_" in text.casefold():
        raise _refused(text)
    try:
        body = ast.parse(plain.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _refused(text) from error
    names: set[str] = set()
    waiting: list[tuple[ast.AST, bool]] = [(body, False)]  # with whether it is an argument
    while waiting:
        node, argument = waiting.pop()
        if isinstance(node, ast.Name):
            names.add(node.id)
            continue
        below = _inside(node, argument)
        if below is None:
            raise _refused(text, _hint(node))
        waiting += below
    stands_for = {f"_column_{i}_": name for i, name in enumerate(quoted)}
    if any(name.startswith("__") for name in names):
        raise _refused(text)
    return {stands_for.get(name, name) for name in names}


def _inside(node: ast.AST, argument: bool) -> list[tuple[ast.AST, bool]] | None:
    """Return the parts of an expression that are still to be checked; None if it is not allowed."""
    match node:
        case ast.Call(func=ast.Name(id=name), args=given, keywords=named) if name in FUNCTIONS:
            # formulaic passes its own state in arguments whose names begin with an underscore.
            if any(word.arg is None or word.arg.startswith("_") for word in named):
                return None
            _check_columns(
                name, dict(enumerate(given)) | {str(one.arg): one.value for one in named}
            )
            return [(part, True) for part in (*given, *(word.value for word in named))]
        case ast.BinOp(left=left, op=op, right=right) if isinstance(op, _ARITHMETIC):
            # 9**9**9 would be computed to the last digit.
            if isinstance(op, ast.Pow) and not (_has_column(left) or _has_column(right)):
                return None
            return [(left, False), (right, False)]
        case ast.UnaryOp(op=op, operand=part) if isinstance(op, _ARITHMETIC):
            return [(part, False)]
        case ast.Compare(left=left, ops=ops, comparators=others) if all(
            isinstance(op, _ARITHMETIC) for op in ops
        ):
            return [(part, True) for part in (left, *others)]
        case ast.List(elts=parts) | ast.Tuple(elts=parts) if argument:
            return [(part, True) for part in parts]
        case ast.Constant(value=str(text)) if argument and re.fullmatch(r"[^'\"\\`{}]*", text):
            return [] if text.isprintable() else None
        case ast.Constant(value=bool() | int() | float() | None):
            return []
    return None


def _check_columns(name: str, arguments: Mapping[int | str, ast.AST]) -> None:
    """Refuse a spline or a polynomial of so many columns that it would fill the memory."""
    for place in _COLUMNS.get(name, ()):
        match node := arguments.get(place, ast.Constant(value=None)):
            case ast.Constant(value=None):
                continue
            case ast.Constant(value=int(count)) if (
                count is not True and 0 <= count <= _MOST_COLUMNS
            ):
                continue
            case ast.List(elts=parts) | ast.Tuple(elts=parts) if len(parts) <= _MOST_COLUMNS:
                continue
        rule = f"have whole numbers up to {_MOST_COLUMNS} as df and degree of {name}, and as many knots at most"
        raise refusal("formula", rule, ast.unparse(node))


def _has_column(node: ast.AST) -> bool:
    called = {id(part.func) for part in ast.walk(node) if isinstance(part, ast.Call)}
    return any(isinstance(part, ast.Name) and id(part) not in called for part in ast.walk(node))


def _hint(node: ast.AST) -> str:
    """Return how to write the refused piece instead, if there is a way."""
    if not isinstance(node, ast.Call):
        return ""
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name == "Q":
        return "; a column with spaces in its name stands in backticks: `a b`"
    if name in FUNCTIONS:
        return f"; write {name}(...)"
    return checks.nearest(name, FUNCTIONS)


def check_size(formula: str) -> None:
    """Refuse products and powers of so many terms that they would fill the memory.

    Args:
      formula: one that `columns_of` has accepted.
    """
    from formulaic.parser import DefaultFormulaParser

    tree: Any = DefaultFormulaParser().get_ast(formula)
    counts: dict[int, int] = {}
    waiting: list[tuple[Any, bool]] = [(tree, False)]
    while waiting:  # not by recursion: a sum of many terms is as deep as it is long
        node, ready = waiting.pop()
        parts = list(getattr(node, "args", ()))
        if parts and not ready:
            waiting += [(node, True), *((part, False) for part in parts)]
            continue
        symbol = str(node.operator.symbol) if parts else ""
        each = [counts[id(part)] for part in parts]
        counts[id(node)] = count = _count(symbol, each, parts)
        if count > _MOST_TERMS:
            raise refusal("formula", f"have at most {_MOST_TERMS:,} terms", formula)


def check_levels(terms: Any, frame: Any) -> None:
    """Refuse factors of so many levels that their columns would fill the memory, before any is made.

    Args:
      terms: formulaic's, of the right side.
      frame: the columns, as pandas' table.
    """
    # A factor is counted without its first level: no fewer columns will be made.
    columns = sum(math.prod(_levels(str(one), frame) for one in term.factors) for term in terms)
    if columns > MOST_FOR_NEWTON:
        rule = f"have at most {MOST_FOR_NEWTON:,} columns on its right"
        hint = "; leave out factors of many levels, or their products"
        raise refusal("formula", rule, columns, hint, code="data")
    need, room = 8 * columns * len(frame), memory()
    if room is not None and need > room:
        rule = f"have columns that fit in the {room / 2**30:.2g} GiB of memory"
        what = f"{columns:,} columns of {len(frame):,} rows, {need / 2**30:.2g} GiB"
        raise refusal("formula", rule, what, "; leave out factors of many levels", code="memory")


def _levels(factor: str, frame: Any) -> int:
    """Return how many columns a factor makes at least; 1 for what is known only when it is computed."""
    plain = re.fullmatch(r"C\(\s*`?([^`,()]+?)`?\s*(,.*)?\)", factor, re.DOTALL)
    name = plain[1] if plain else factor.strip("`")
    if name not in frame:
        return 1
    column = frame[name]
    if plain is None and (column.dtype.kind in "fiub" or hasattr(column.dtype, "numpy_dtype")):
        return 1
    return max(column.nunique() - 1, 1)


def _count(symbol: str, each: list[int], parts: list[Any]) -> int:
    """Return an upper bound for the terms that formulaic makes of an operator and its operands."""
    if len(each) < 2:
        return sum(each) or 1
    first, second = each[0], each[1]
    if symbol in ("**", "^"):
        text = str(parts[1])
        power = int(text) if text.isdecimal() and len(text) < 4 else _MOST_TERMS
        return min(max(first, 2) ** min(power, 20), _MOST_TERMS + 1) if power > 1 else first
    if symbol == ":":
        return first * second
    return first + second + (first * second if symbol == "*" else 0)
