"""A study as data, from TOML or from Python: a grid of cells, checked when it is created."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxlsgd.core import checks
from jaxlsgd.core.checks import Dtype, refusal
from jaxlsgd.core.display import Table, Tabular, facts, plural
from jaxlsgd.core.rows import Until
from jaxlsgd.core.storage import read_regular
from jaxlsgd.schedules.plan import LOOKS
from jaxlsgd.study.cells import EXCLUDE_KEYS, EXTRA_KEYS, CellSpec, digest_of, expand, read_rules
from jaxlsgd.study.errors import OwnError, SpecError, refusing
from jaxlsgd.study.parts import (
    MOST_STEPS,
    Extent,
    Nested,
    Part,
    names,
    part,
    plain_schedule,
    problems,
    read_problem,
    read_schedule,
    schedule,
    thawed,
)

if TYPE_CHECKING:
    from jaxlsgd.study.runner import Outcome

MOST_CELLS = 100_000
MOST_LEVELS = 1_000
MOST_BYTES = 1_000_000  # of a study file
MOST_RULES = 20_000_000  # rules of `exclude` times what each is compared with
MOST_DOTS = 200  # of a key: the time to parse TOML grows with their square


@dataclasses.dataclass(frozen=True, repr=False)
class Study(Tabular):
    """A grid problems × algorithms × schedules × horizons, with methods, levels and replications.

    Values may be given as they stand in a study file (names, tables as dicts) or as objects. They are
    checked at once and kept as named parts.

    Args:
      problems: kinds ("paper-linear"), `Problem` objects with a name, or tables {kind or problem, name, gamma0,
        alpha, builder's arguments}; lists of gamma0 and alpha make one problem of each combination; alpha = 0
        is a constant step.
      schedules: paper names ("C5"), tables {family, arguments, name, warmup} or `Schedule` objects.
      horizons: observations per client t_T, or tables {num_steps} or {num_rounds}.
      methods: names ("plug_in", "random_scaling[schedule]"), `Estimator` objects, or tables {kind, arguments,
        name}.
      algorithms: names ("local_sgd"), `Algorithm` objects, or tables {kind, arguments, name}.
      replications: independent runs of every cell; more of them later extend a study.
      seed: root of all draws; the same data for every cell (common random numbers).
      levels: confidence levels in (0, 1), one or several.
      warmup: share of the observations with E = 1, for schedules without one of their own.
      save_at: rounds (integers) or shares of the observations (floats in (0, 1]) at which intervals
        are kept besides the last; one integer n means n evenly spaced shares.
      until: a half-width, or a table {half_width, excludes, method, coordinates, level}: when a run would stop, which
        tables and the page then show. All looks of all runs are computed, at `save_at`; if that is empty, at 50 shares of
        the observations from 2 % on. Rows do not depend on the rule, so that it can be changed later.
      tile_size: replications that run side by side and are committed together.
      dtype: "float32" or "float64".
      cross: whether the grid is crossed; if not, `extra` alone lists the cells.
      exclude: tables of problem, algorithm, schedule, num_steps or num_rounds, and method: whatever
        matches all values of a table is left out.
      extra: tables {problem, algorithm, schedule, num_steps or num_rounds, methods} of cells beside the
        grid.

    Example::

        study = Study(
            problems=[my_problem, "paper-logistic"], schedules=["C1", "C5"], horizons=[5000],
            methods=["plug_in", my_method], warmup=0.05, replications=1000, seed=0,
        )
        study.run("results")
    """

    problems: Any  # tuple[ProblemPart, ...] once made, and so on
    schedules: Any  # tuple[Schedule, ...]
    horizons: Any = ()  # tuple[Extent, ...]
    methods: Any = ("one_step", "plug_in[finite]")  # tuple[Part, ...]
    algorithms: Any = ("local_sgd",)  # tuple[Part, ...]
    replications: int = 1000
    seed: int = 0
    levels: Any = (0.95,)  # tuple[float, ...]
    warmup: dataclasses.InitVar[float] = 0.0
    save_at: Any = ()  # tuple[int | float, ...]
    until: Any = None  # Until | None
    tile_size: int = 512
    dtype: Dtype = "float32"
    cross: bool = True
    exclude: Any = ()
    extra: Any = ()

    def __post_init__(self, warmup: float) -> None:
        with refusing():
            self._settle(warmup)

    def _settle(self, warmup: float) -> None:
        put = functools.partial(object.__setattr__, self)
        found = _each("problems", self.problems, problems, "problem")
        put("problems", tuple(itertools.chain.from_iterable(found)))
        share = checks.number("warmup", warmup)
        if not 0 <= share < 1:
            raise refusal("warmup", "be a share of the observations in [0, 1)", warmup)
        read = functools.partial(schedule, warmup=share)
        put("schedules", _each("schedules", self.schedules, read, "schedule"))
        put("methods", _each("methods", self.methods, functools.partial(part, "method"), "method"))
        read_algorithm = functools.partial(part, "algorithm")
        put("algorithms", _each("algorithms", self.algorithms, read_algorithm, "algorithm"))
        put("levels", _each("levels", _one_or_more(self.levels), checks.level, "level"))
        for key in ("problems", "schedules", "methods", "algorithms"):
            checks.distinct(key, names(getattr(self, key)), named=True)
        checks.distinct("levels", self.levels)
        if len(self.levels) > MOST_LEVELS:
            raise refusal("levels", f"be at most {MOST_LEVELS}", self.levels)
        most = checks.MOST_REPLICATIONS
        put("replications", checks.count("replications", self.replications, 1, most))
        put("seed", checks.count("seed", self.seed, 0, 2**32 - 1))
        put("tile_size", checks.count("tile_size", self.tile_size, 1, 65_536))
        put("dtype", checks.choice("dtype", self.dtype, checks.Dtype))
        put("until", None if self.until is None else Until.of(self.until))
        looks = () if self.until is None else LOOKS
        put("save_at", _save_at(self.save_at) or looks)
        if not isinstance(self.cross, bool):
            raise refusal("cross", "be true or false", self.cross, code="type")
        need = self.cross or self.horizons not in ((), [])
        put("horizons", _each("horizons", self.horizons, Extent.of, "horizon") if need else ())
        checks.distinct("horizons", map(str, self.horizons))
        put("exclude", read_rules(self, "exclude", EXCLUDE_KEYS))
        put("extra", read_rules(self, "extra", EXTRA_KEYS))
        assert self.cells

    @classmethod
    def from_dict(cls, table: Mapping[str, Any]) -> Study:
        """Return a study from the contents of a study file."""
        with refusing():
            table = checks.table("study", table, "a table of problems, schedules, methods and more")
            known = [field.name for field in dataclasses.fields(cls)] + ["warmup"]
            checks.known_keys("", table, known)
        for key in ("problems", "schedules"):
            if key not in table:
                text = f"{key}: is missing; a study needs problems and schedules"
                raise SpecError(text, key, "missing")
        return cls(**table)

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str]) -> Study:
        """Return a study from a TOML file; refusals name the file, the key and the value."""
        try:
            return cls.from_dict(_read_toml(Path(path)))
        except OwnError:
            raise
        except SpecError as error:
            text = f"{os.fspath(path)}: {error}"
            raise SpecError(text, error.argument, error.code) from error

    @classmethod
    def read(cls, plain: Mapping[str, Any]) -> Study:
        """Return the study that `plain` describes, with names and digests in place of objects."""
        with refusing():
            table = checks.table("study", plain, "the content of a manifest")
            parts = {
                "problems": tuple(map(read_problem, table.pop("problems"))),
                "schedules": tuple(map(read_schedule, table.pop("schedules"))),
                "methods": tuple(Part.read("method", x) for x in table.pop("methods")),
                "algorithms": tuple(Part.read("algorithm", x) for x in table.pop("algorithms")),
            }
            checks.known_keys("study", table, [field.name for field in dataclasses.fields(cls)])
            return cls(**parts, **table)

    @functools.cached_property
    def cells(self) -> tuple[CellSpec, ...]:
        """The cells in order: problems, then algorithms, then schedules, then horizons."""
        most = len(self.problems) * len(self.algorithms) * len(self.schedules)
        most *= max(1, len(self.horizons))
        if most + len(self.extra) > MOST_CELLS:
            text = (
                f"the grid has {most + len(self.extra)} cells, more than the {MOST_CELLS} allowed"
            )
            raise SpecError(text, "cells")
        if most * len(self.methods) * len(self.exclude) > MOST_RULES:
            raise refusal("exclude", "have fewer rules for so large a grid", len(self.exclude))
        cells = tuple(expand(self))
        if not cells:
            cause = "every cell is excluded" if self.cross else "cross is false and extra is empty"
            raise SpecError(f"the grid is empty: {cause}", "cells", "missing")
        checks.distinct("cells", (cell.coordinates for cell in cells))
        return cells

    @property
    def tiles_per_cell(self) -> int:
        """Number of tiles of each cell."""
        return -(-self.replications // self.tile_size)

    def plain(self) -> dict[str, Any]:
        """Return the study as JSON data, from which `read` makes an equal one."""
        return {
            "problems": [problem.plain() for problem in self.problems],
            "schedules": [plain_schedule(schedule) for schedule in self.schedules],
            "horizons": [extent.plain() for extent in self.horizons],
            "methods": [method.plain() for method in self.methods],
            "algorithms": [algorithm.plain() for algorithm in self.algorithms],
            "levels": list(self.levels),
            "save_at": list(self.save_at),
            "replications": self.replications,
            "seed": self.seed,
            "tile_size": self.tile_size,
            "dtype": self.dtype,
            "cross": self.cross,
            "exclude": [thawed(Nested(rule)) for rule in self.exclude],
            "extra": [thawed(Nested(rule)) for rule in self.extra],
            **({} if self.until is None else {"until": self.until.plain()}),
        }

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of everything but the number of replications, which may grow, and the rule for stopping."""
        plain = self.plain()
        del plain["replications"]
        plain.pop("until", None)
        return digest_of(plain)

    def __repr__(self) -> str:
        return f"Study(cells={len(self.cells)}, replications={self.replications}, seed={self.seed})"

    def table(self) -> Table:
        """Return what the study is, as a table; `print(study)` and a notebook show it."""
        tiles = plural(len(self.cells) * self.tiles_per_cell, "tile")
        lines = [
            *((key, _brief(names(getattr(self, key)))) for key in ("problems", "algorithms")),
            ("schedules", _brief(map(str, self.schedules))),
            ("horizons", _brief(map(str, self.horizons))),
            ("methods", _brief(names(self.methods))),
            ("levels", _brief(f"{level:g}" for level in self.levels)),
            ("replications", f"{self.replications:,} per cell, {tiles} of {self.tile_size}"),
            ("seed", self.seed),
            ("dtype", self.dtype),
        ]
        return facts("study", plural(len(self.cells), "cell"), lines)

    def run(self, directory: str | os.PathLike[str], **options: Any) -> Outcome:
        """Run what is missing of the study in a directory; see `runner.run` for the options.

        Example::

            study.run("results", max_time=3600)
            study.run("results", client=dask.distributed.Client("tcp://scheduler:8786"))
        """
        from jaxlsgd.study import runner

        return runner.run(self, directory, **options)


def _brief(texts: Iterable[str]) -> str:
    """Return texts side by side, at most eight of them."""
    found = list(texts)
    return ", ".join(found[:8]) + (f", … ({len(found)} in all)" if len(found) > 8 else "")


def differences(old: Any, new: Any) -> list[str]:
    """Return what differs between two studies or environments as JSON data, as 'key: old → new'."""
    before, after = dict(_leaves(old)), dict(_leaves(new))
    absent = object()
    lines = []
    for key in dict.fromkeys([*before, *after]):
        pair = before.get(key, absent), after.get(key, absent)
        if pair[0] != pair[1]:
            texts = ["(absent)" if value is absent else checks.shown(value) for value in pair]
            lines.append(f"{key}: {texts[0]} → {texts[1]}")
    return lines


def _leaves(content: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(content, dict):
        for key, value in content.items():
            yield from _leaves(value, f"{where}.{key}" if where else key)
    elif isinstance(content, list):
        for i, value in enumerate(content):
            yield from _leaves(value, f"{where}[{i}]")
    else:
        yield where, content


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        content = read_regular(path, MOST_BYTES)
    except OSError as error:
        raise SpecError(f"cannot be read: {error.strerror}", "path", "unavailable") from error
    if len(content) > MOST_BYTES:
        text = f"is larger than {MOST_BYTES} bytes, more than any study file needs"
        raise SpecError(text, "path")
    try:
        text = content.decode("utf-8")
        if any(part.count(".") > MOST_DOTS for part in re.split(r"[=,\n{}\[\]]", text)):
            raise SpecError(f"has a key or a line with more than {MOST_DOTS} dots", "path")
        return tomllib.loads(text)
    except SpecError:
        raise
    except (ValueError, RecursionError) as error:
        raise SpecError(f"is not valid TOML: {error}", "path", "damaged") from error


def _each(key: str, values: Any, read: Callable[[Any, str], Any], what: str) -> tuple[Any, ...]:
    listed = enumerate(checks.sequence(key, values, what))
    return tuple(read(value, f"{key}[{i}]") for i, value in listed)


def _one_or_more(value: Any) -> Any:
    return [value] if isinstance(value, int | float) else value


def _save_at(value: Any) -> tuple[int | float, ...]:
    if isinstance(value, int) and not isinstance(value, bool):
        count = checks.count("save_at", value, 1, 10_000)
        return tuple(i / count for i in range(1, count + 1))
    if not isinstance(value, (list, tuple)) or len(value) > 10_000:
        raise refusal(
            "save_at",
            "be a list of rounds or of shares of the observations in (0, 1]",
            value,
            code="type",
        )
    return tuple(_save(f"save_at[{i}]", part) for i, part in enumerate(value))


def _save(where: str, value: Any) -> int | float:
    if not isinstance(value, float):
        return checks.count(where, value, 1, MOST_STEPS)
    if not 0 < value <= 1:
        raise refusal(
            where, "be a share of the observations in (0, 1], or an integer, a round", value
        )
    return value
