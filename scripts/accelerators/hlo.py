"""Reads what matters from the text of a compiled program: loops, kernels, precision, collectives."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

# Instructions that launch nothing.
_FREE = {"parameter", "get-tuple-element", "tuple", "bitcast", "constant", "while", "after-all"}
_COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%([\w.\-]+) \(.*?\{\n(.*?)^\}", re.M | re.S)
_ENTRY = re.compile(r"^ENTRY %([\w.\-]+) ", re.M)
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\(", re.M)
_WHILE = re.compile(r" while\(.*?condition=%([\w.\-]+), body=%([\w.\-]+)(.*)")
_TRIPS = re.compile(r'known_trip_count"?:\{"n":"(\d+)"\}')
_LIMIT = re.compile(r"= s32\[\]\S* constant\((\d+)\)")
_PRODUCTS = {"dot", "convolution"}
_LIBRARY = re.compile(r'custom_call_target="[^"]*(?:cublas|cudnn|gemm)', re.I)
_OPERAND = re.compile(r"%([\w.\-]+)")
_ARRAY = re.compile(r"\b(pred|[a-z]\d+)\[([\d,]*)\]")
_HIGHEST = re.compile(r'operand_precision(?:=\{highest,highest\}|":\["HIGHEST","HIGHEST"\])')


class Loop(NamedTuple):
    """A while loop: how often it runs, and what it launches each time."""

    trips: int | None  # None if unknown to the compiler
    kernels: list[str]  # kind, name and shape of each
    statistics: int  # how many of them feed the statistics, once per round
    collectives: list[str]
    bytes: int  # that the kernels read and write each time


def loops(text: str, scalars: bool) -> list[Loop]:
    """All loops of a program.

    Args:
      text: of `compiled.as_text()`.
      scalars: whether arithmetic on single numbers is launched like the rest, as on a GPU, or done
        beside it, as on a TPU.
    """
    bodies = dict(_COMPUTATION.findall(text))
    found = []
    for condition, body, rest in _WHILE.findall(text):
        kernels, statistics, moved, shapes = [], 0, 0, {}
        for line in bodies[body].splitlines():
            match = _INSTRUCTION.match(line)
            if match:
                shapes[match[1]] = match[2]
            if not match or _is_free(match, scalars):
                continue
            kernels.append(f"{match[3]} {match[1]} {match[2][:60]}")
            statistics += "/statistics/" in line  # the name that the engine gives that part
            read = _OPERAND.findall(line[match.end() :].partition(")")[0])
            moved += _size(match[2]) + sum(_size(shapes.get(name, "")) for name in read)
        within = [kind for kind in _COLLECTIVES if f" {kind}" in bodies[body]]
        found.append(Loop(_trips(rest, bodies[condition]), kernels, statistics, within, moved))
    return found


def launches(text: str, scalars: bool) -> int:
    """Return how many kernels one run of a program launches; loops as often as they run."""
    bodies = dict(_COMPUTATION.findall(text))
    trips = {body: _trips(rest, bodies[at]) or 1 for at, body, rest in _WHILE.findall(text)}

    def of(name: str) -> int:
        count = 0
        for line in bodies[name].splitlines():
            match = _INSTRUCTION.match(line)
            if loop := _WHILE.search(line):
                count += trips[loop[2]] * of(loop[2])
            elif match and match[3] == "call":
                count += of(line.partition("to_apply=%")[2].partition(",")[0].split()[0])
            elif match and not _is_free(match, scalars):
                count += 1
        return count

    return of(_ENTRY.findall(text)[0])


def _is_free(match: re.Match[str], scalars: bool) -> bool:
    return match[3] in _FREE or (_is_scalar(match[2]) and not scalars)


def _size(shape: str) -> int:
    """Bytes of an array, or of all arrays of a tuple."""
    total = 0
    for kind, dims in _ARRAY.findall(shape):
        count = math.prod(int(n) for n in dims.split(",") if n)
        total += count * {"pred": 1, "c64": 8, "s64": 8, "u64": 8, "f64": 8}.get(kind, 4)
    return total


def _trips(rest: str, condition: str) -> int | None:
    """The count that the compiler wrote down; without one, the limit that a counter runs up to."""
    match = _TRIPS.search(rest)
    if match:
        return int(match[1])
    limits = _LIMIT.findall(condition)
    counts = len(limits) == 1 and "direction=LT" in condition and " and(" not in condition
    return int(limits[0]) if counts else None


def _is_scalar(shape: str) -> bool:
    return not shape.startswith("(") and re.match(r"\w+\[1?\]", shape) is not None


def products(text: str) -> list[re.Match[str]]:
    """Return the products of float32 in a program: what an instruction does says so, not its name or its operands'."""
    found = (_INSTRUCTION.match(line) for line in text.splitlines())
    return [one for one in found if one and _is_product(one)]


def _is_product(match: re.Match[str]) -> bool:
    library = match[3] == "custom-call" and _LIBRARY.search(match.string)
    return "f32[" in match.string and bool(match[3] in _PRODUCTS or library)


def low_precision(text: str) -> list[str]:
    """Signs of bf16 or TF32: such values, or products of float32 at less than full precision."""
    found = sorted(set(re.findall(r"\b(?:bf16\[[\d,]*\]|tf32)", text, re.I)))
    less = (one for one in products(text) if not _HIGHEST.search(one.string))
    return [*found, *(f"{one[3]} {one[1]} without full precision" for one in less)]
