"""Reads what matters from the text of a compiled program: loops, kernels, precision, collectives."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

# Instructions that launch nothing.
_FREE = {"parameter", "get-tuple-element", "tuple", "bitcast", "constant", "while", "after-all"}
_COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%([\w.\-]+) \(.*?\{\n(.*?)^\}", re.M | re.S)
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\(", re.M)
_WHILE = re.compile(r" while\(.*?condition=%([\w.\-]+), body=%([\w.\-]+)(.*)")
_TRIPS = re.compile(r'known_trip_count"?:\{"n":"(\d+)"\}')
_LIMIT = re.compile(r"= s32\[\]\S* constant\((\d+)\)")
_PRODUCT = re.compile(r" (?:dot|convolution)\(|cublas|gemm")
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
            if not match or match[3] in _FREE or (_is_scalar(match[2]) and not scalars):
                continue
            kernels.append(f"{match[3]} {match[1]} {match[2][:60]}")
            statistics += "/statistics/" in line  # the name that the engine gives that part
            read = _OPERAND.findall(line[match.end() :].partition(")")[0])
            moved += _size(match[2]) + sum(_size(shapes.get(name, "")) for name in read)
        within = [kind for kind in _COLLECTIVES if f" {kind}" in bodies[body]]
        found.append(Loop(_trips(rest, bodies[condition]), kernels, statistics, within, moved))
    return found


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


def low_precision(text: str) -> list[str]:
    """Signs of bf16 or TF32: such values, or products of float32 at less than full precision."""
    found = sorted(set(re.findall(r"\b(?:bf16\[[\d,]*\]|tf32)", text, re.I)))
    for line in text.splitlines():
        named = _INSTRUCTION.match(line)
        if named and _PRODUCT.search(line) and "f32[" in line and not _HIGHEST.search(line):
            # What a fusion calls is a line of its own, and what is free only names a product.
            if named[3] == "fusion" or named[3] in _FREE:
                continue
            found.append(f"{named[3]} {named[1]} without full precision")
    return found
