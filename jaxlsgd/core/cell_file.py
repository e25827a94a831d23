"""The rows of a cell in one file, with their description as JSON."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from jaxlsgd.core import checks, storage
from jaxlsgd.core.causes import Cause
from jaxlsgd.core.rows import CellRows, MethodRows, Until
from jaxlsgd.core.storage import replacing

FORMAT = 3
# The arrays of a method's rows, and their types in a file.
ARRAYS = {
    "estimate": "<f8",
    "scale": "<f8",
    "half_width": "<f8",
    "floored": "|b1",
    "cause": "|u1",
}
SEVERAL_LOOKS = {"looks", "always"}  # the times at which intervals of a method may hold together


class Unfit(ValueError):
    """Content that does not describe a cell."""


def save(cell: CellRows, path: str | Path, *, force: bool = False) -> Path:
    """Write a cell whole or not at all, and return the path; see `CellRows.save`."""
    path = Path(path)
    about = {"format": FORMAT, "methods": list(cell.methods), "cell": about_to_json(cell)}
    header = json.dumps(about, sort_keys=True, allow_nan=False).encode()
    arrays = {"header": np.frombuffer(header, np.uint8)}
    for name, rows in cell.methods.items():
        for field, kind in ARRAYS.items():
            arrays[f"{name}.{field}"] = np.ascontiguousarray(getattr(rows, field), kind)
    with replacing(path, force) as temporary:
        temporary.write_bytes(storage.seal(arrays))
    return path


def load_cell(path: str | Path) -> CellRows:
    """Return the rows that `CellRows.save` wrote, to the last bit.

    Nothing in the file is run or unpickled. A file of another format, or one that was altered or cut short, is
    refused.

    Args:
      path: the file.

    Returns:
      The rows.

    Example::

        simulate(key, problem, plan, replications=1000).save("cell.npz")
        print(measures.coverage_table(load_cell("cell.npz")))
    """
    content = Path(path).read_bytes()
    try:
        about, methods = _header(storage.first_array(content, "header"))
        names = [f"{name}.{field}" for name in methods for field in ARRAYS]
        arrays = storage.unseal(content, ("header", *names))
        cell = about_from_json(about, methods)
        rows = {
            name: _rows([arrays[f"{name}.{field}"] for field in ARRAYS], cell, name)
            for name in methods
        }
    except (storage.Broken, Unfit) as error:
        text = f"{path} does not hold the rows of a cell: {error}"
        raise checks.Refusal(text, "path", "damaged") from error
    return dataclasses.replace(cell, methods=rows)


def _header(raw: np.ndarray) -> tuple[Any, list[str]]:
    """Return the description of the cell and its methods, in the order of the rows."""
    try:
        content = json.loads(raw.tobytes())
        format = content["format"]
        _require(
            format == FORMAT,
            f"it has format {format!r}, and this version reads {FORMAT}; simulate again and save it",
        )
        about, names = content["cell"], content["methods"]
    except Unfit:
        raise
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Unfit("its header cannot be read") from error
    named = isinstance(names, list) and names and all(map(_is_name, names))
    _require(named and len(set(names)) == len(names), "its header names no methods")
    return about, names


def _rows(parts: list[Any], cell: CellRows, name: str) -> MethodRows:
    count = parts[0].shape[1] if parts[0].ndim == 3 else 0
    if not fits(parts, len(cell.save_at), len(cell.levels), count, len(cell.coordinates[name])):
        raise Unfit("its arrays do not have the shape of the cell")
    return MethodRows(*(part.copy() for part in parts))


def fits(parts: list[Any], saves: int, levels: int, count: int, coordinates: int) -> bool:
    """Return whether arrays have the types and shapes of a method's rows, and valid causes."""
    place = (saves, count, coordinates)
    shapes = [place, place, (saves, levels, count, coordinates), place[:2], place[:2]]
    found = [part.shape for part in parts], [part.dtype.str for part in parts]
    return found == (shapes, list(ARRAYS.values())) and parts[-1].max(initial=0) <= max(Cause)


def about_to_json(about: CellRows) -> dict[str, Any]:
    """Return the description of a cell: everything but its rows."""
    fields = [field.name for field in dataclasses.fields(about) if field.name != "methods"]
    content = {name: getattr(about, name) for name in fields}
    truth = {name: None if x is None else x.tolist() for name, x in about.truth.items()}
    content |= {"truth": truth}
    # Left out if empty.
    errors = {name: x.tolist() for name, x in content.pop("truth_error").items()}
    rule, valid = content.pop("until"), content.pop("valid")
    content |= {"truth_error": errors} if errors else {}
    content |= {"valid": valid} if valid else {}
    return content | ({} if rule is None else {"until": rule.plain()})


def about_from_json(content: Any, methods: list[str]) -> CellRows:
    """Return what `about_to_json` described. Every value is checked, as a checksum can be forged."""
    names = {field.name for field in dataclasses.fields(CellRows)} - {"methods"}
    if isinstance(content, dict):
        content = {"truth_error": {}, "valid": {}, "until": None, **content}
    _require(isinstance(content, dict) and set(content) == names, "it has other fields than a cell")
    texts = [content[key] for key in ("problem", "algorithm", "schedule")]
    _require(all(map(_is_name, texts)), "its names are not printable")
    lengths = [content["num_steps"], content["num_rounds"]]
    saves, steps, levels = content["save_at"], content["steps_at"], content["levels"]
    whole = all(_is_list_of(values, int) for values in (lengths, saves, steps))
    _require(whole and len(saves) == len(steps), "its rounds and steps are not whole numbers")
    _require(_is_list_of(levels, float), "its levels are not numbers")
    labels, truth = content["coordinates"], content["truth"]
    named = isinstance(labels, dict) and set(labels) == set(methods)
    named = named and all(
        isinstance(x, list) and x and all(map(_is_name, x)) for x in labels.values()
    )
    _require(named, "its coordinates are not names, method by method")
    by_method = isinstance(truth, dict) and set(truth) == set(methods)
    _require(by_method, "its truth is not given method by method")
    known = {name: _truth(truth[name], len(labels[name])) for name in methods}
    errors = content["truth_error"]
    _require(isinstance(errors, dict), "its truth_error is not given method by method")
    errors = {name: _truth_error(x, known.get(name)) for name, x in errors.items()}
    shown, costs = content["labels"], content["costs"]
    complete = _is_by_method(content["standard_error"], methods, bool)
    complete = complete and _is_by_method(shown, methods, str)
    _require(complete, "its methods do not all have a label and a kind of scale")
    _require(_is_by_some(costs, methods), "its costs are not texts by method")
    valid = content["valid"]
    _require(_is_by_some(valid, methods), "its times of validity are not texts by method")
    _require(set(valid.values()) <= SEVERAL_LOOKS, "its times of validity are not known")
    texts = [*shown.values(), *costs.values()]
    _require(all(map(str.isprintable, texts)), "its methods' names are not printable")
    sent, under_c1 = content["numbers_sent"], content["sent_under_c1"]
    counted = _is_counted(sent, under_c1, methods, len(saves))
    _require(counted, "its numbers sent are not given for every method and saved round")
    tuples = ("save_at", "steps_at", "levels", "sent_under_c1")
    lists: dict[str, Any] = {key: tuple(content[key]) for key in tuples}
    lists["coordinates"] = {name: tuple(labels[name]) for name in methods}
    lists["numbers_sent"] = {name: tuple(x) for name, x in sent.items()}
    lists["until"] = _until(content["until"])
    return CellRows(**{**content, **lists, "truth": known, "truth_error": errors, "methods": {}})


def _until(rule: Any) -> Until | None:
    """Return a rule for stopping."""
    if rule is None:
        return None
    _require(isinstance(rule, dict), "its rule for stopping is not a table")
    try:
        found = Until.of(rule)
    except (ValueError, TypeError) as error:
        raise Unfit(f"its rule for stopping cannot be read: {error}") from error
    named = [*found.coordinates, *([] if found.method is None else [found.method])]
    _require(all(map(_is_name, named)), "its rule for stopping has names that are not printable")
    return found


def _require(holds: object, otherwise: str) -> None:
    if not holds:
        raise Unfit(otherwise)


def _is_counted(sent: Any, under_c1: Any, methods: list[str], saves: int) -> bool:
    """Return whether numbers sent are given for every method and saved round, or not at all."""
    if sent == {} and under_c1 == []:
        return True
    if not (isinstance(sent, dict) and set(sent) == set(methods)):
        return False
    lists = [under_c1, *sent.values()]
    return all(
        isinstance(one, list)
        and len(one) == saves
        and all(type(x) in (int, float) and 0 < x < float("inf") for x in one)
        for one in lists
    )


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable()


def _is_list_of(values: Any, kind: type) -> bool:
    return isinstance(values, list) and bool(values) and all(type(x) is kind for x in values)


def _is_by_method(values: Any, methods: list[str], kind: type) -> bool:
    complete = isinstance(values, dict) and set(values) == set(methods)
    return complete and all(type(value) is kind for value in values.values())


def _is_by_some(values: Any, methods: list[str]) -> bool:
    """Return whether the values are texts of some of the methods."""
    some = isinstance(values, dict) and set(values) <= set(methods)
    return some and all(type(value) is str for value in values.values())


def _truth(values: Any, count: int) -> np.ndarray | None:
    if values is None:
        return None
    numbers = isinstance(values, list) and all(type(x) in (int, float) for x in values)
    _require(numbers, "its truth is not a list of numbers")
    _require(len(values) == count, "its truth has another length than its coordinates")
    return np.array(values, np.float64)


def _truth_error(values: Any, truth: np.ndarray | None) -> np.ndarray:
    """Return the standard errors of a truth."""
    if truth is None or values is None:
        raise Unfit("it has the error of a truth that it does not have")
    error = _truth(values, len(truth))
    if error is None or not np.all(np.isfinite(error) & (error >= 0)):
        raise Unfit("the error of its truth is not a standard error")
    return error
