"""Rows: the results of every replication of a cell, as plain NumPy arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from jaxlsgd.core import checks
from jaxlsgd.core.causes import Cause, causes
from jaxlsgd.core.checks import refusal
from jaxlsgd.core.display import Table, Tabular, facts
from jaxlsgd.core.lazy import later

if TYPE_CHECKING:
    from jaxlsgd.core.estimator import Estimator


@dataclasses.dataclass(frozen=True)
class MethodRows:
    """The results of one method, for every saved round and replication."""

    estimate: NDArray[np.float64]  # (saves, replications, coordinates)
    scale: NDArray[np.float64]  # (saves, replications, coordinates)
    half_width: NDArray[np.float64]  # (saves, levels, replications, coordinates)
    floored: NDArray[np.bool_]  # (saves, replications): a numerical floor acted
    cause: NDArray[np.uint8] = None  # type: ignore[assignment]  # (saves, replications), of `Cause`

    def __post_init__(self) -> None:
        if self.cause is None:  # type: ignore[redundant-expr]  # from rows alone, without the loss
            found = causes(self.estimate, self.half_width, self.floored)
            object.__setattr__(self, "cause", found)

    @property
    def ok(self) -> NDArray[np.bool_]:
        """Return which replications completed, (saves, replications)."""
        # The numbers count too, because rows may come from a file.
        finite = np.all(np.isfinite(self.estimate) & np.isfinite(self.half_width).all(1), axis=-1)
        return finite & (self.cause <= Cause.FLOORED)

    @classmethod
    def joined(cls, parts: Sequence[MethodRows], keep: int | None = None) -> MethodRows:
        """Join ranges of replications, and keep the first `keep`."""

        def join(name: str, axis: int) -> np.ndarray:
            whole = np.concatenate([getattr(part, name) for part in parts], axis=axis)
            return whole if keep is None else whole.take(range(keep), axis=axis)

        axes = {"estimate": 1, "scale": 1, "half_width": 2, "floored": 1, "cause": 1}
        return cls(**{name: join(name, axis) for name, axis in axes.items()})

    @classmethod
    def stacked(cls, saves: Sequence[MethodRows]) -> MethodRows:
        """Stack saved rounds, each without the leading axis."""
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(*(np.stack([getattr(rows, name) for rows in saves]) for name in names))


@dataclasses.dataclass(frozen=True)
class Until:
    """When a run is sure enough to stop: at the first look at which all that is given holds, for every coordinate.

    Args:
      half_width: intervals are at most that to either side.
      excludes: intervals do not hold this null.
      method: whose intervals; the first of a run if None.
      coordinates: names of those that count; all if empty.
      level: of the intervals; the first of a run if None.
    """

    half_width: float | None = None
    excludes: float | None = None
    method: str | None = None
    coordinates: tuple[str, ...] = ()
    level: float | None = None

    def __post_init__(self) -> None:
        if self.half_width is None and self.excludes is None:
            raise refusal(
                "until", "have a half_width or a null that it excludes", "neither", code="missing"
            )
        if self.half_width is not None:
            checks.positive("half_width", self.half_width)
        if self.excludes is not None:
            checks.number("excludes", self.excludes)
        if isinstance(self.coordinates, str):
            raise refusal("until.coordinates", "be a list of names", self.coordinates, code="type")
        if self.level is not None:
            checks.level(self.level, "until.level")

    @classmethod
    def of(cls, given: float | Until | Mapping[str, Any]) -> Until:
        """Return a rule as it is, that of a table, and a number as the rule of that half-width."""
        if not isinstance(given, Mapping):
            return given if isinstance(given, Until) else cls(half_width=given)
        names = [field.name for field in dataclasses.fields(cls)]
        table = checks.table("until", given, f"a half-width, or a table of {', '.join(names)}")
        checks.known_keys("until", table, names)
        listed = table.pop("coordinates", ())
        return cls(
            coordinates=tuple(
                checks.sequence("until.coordinates", listed, "name") if listed else ()
            ),
            **table,
        )

    def plain(self) -> dict[str, Any]:
        """Return the rule as JSON data, without what it leaves open; `of` reads it."""
        found = {key: value for key, value in dataclasses.asdict(self).items() if value is not None}
        return {key: list(x) if isinstance(x, tuple) else x for key, x in found.items() if x != ()}

    def chosen(self, methods: Sequence[Estimator], levels: Sequence[float]) -> Estimator:
        """Return the method whose intervals count; refuse a rule that does not suit the run."""
        name = methods[0].name if self.method is None else self.method
        checks.choice("until.method", name, [method.name for method in methods])
        if self.level is not None and self.level not in levels:
            raise refusal("until.level", f"be one of {tuple(levels)}", self.level, code="choice")
        method = next(method for method in methods if method.name == name)
        if self.excludes is not None and method.valid == "fixed":
            rule = (
                f"have no null for {name}, whose intervals hold at one time only: looked at often enough, they "
                'exclude the truth; one_step(valid="always", best_at=...) may be looked at'
            )
            raise refusal("until", rule, self.excludes, code="unsupported")
        return method

    def places(self, names: Sequence[str]) -> list[int]:
        """Return which of a method's coordinates count; refuse names that are not among them."""
        for name in self.coordinates:
            checks.choice("until.coordinates", name, names)
        return [i for i, name in enumerate(names) if name in (self.coordinates or names)]

    def met(self, estimate: Any, half: Any, names: Sequence[str], xp: Any = np) -> Any:
        """Return whether intervals (..., coordinates) are sure enough, (...)."""
        place = np.array(self.places(names))
        estimate, half = estimate[..., place], half[..., place]
        sure = xp.isfinite(estimate) & xp.isfinite(half)
        if self.half_width is not None:
            sure = sure & (half <= self.half_width)
        if self.excludes is not None:
            sure = sure & (xp.abs(estimate - self.excludes) > half)
        return xp.all(sure, -1)


@dataclasses.dataclass(frozen=True, repr=False)
class CellRows(Tabular):
    """All rows of one cell (a problem under a plan), with what their analysis needs."""

    problem: str
    algorithm: str
    schedule: str
    num_steps: int  # t_T
    num_rounds: int  # T
    save_at: tuple[int, ...]  # rounds, the last one T
    steps_at: tuple[int, ...]  # observations used at those rounds
    levels: tuple[float, ...]
    coordinates: dict[str, tuple[str, ...]]  # by method
    truth: dict[str, NDArray[np.float64] | None]  # by method, (coordinates,)
    standard_error: dict[str, bool]  # by method: its scale estimates a standard error
    labels: dict[str, str]  # by method: its name in figures
    methods: dict[str, MethodRows]
    costs: dict[str, str] = dataclasses.field(default_factory=dict)  # by method, if stated
    # By method and saved round: numbers sent per client, see `engine.cost.numbers_sent`.
    numbers_sent: dict[str, tuple[float, ...]] = dataclasses.field(default_factory=dict)
    # By saved round: the same for plain Local SGD that communicates after every step.
    sent_under_c1: tuple[int, ...] = ()
    # By method, (coordinates,): the standard error of `truth`; no entry if that is exact or not known.
    truth_error: dict[str, NDArray[np.float64]] = dataclasses.field(default_factory=dict)
    until: Until | None = None  # when a run of the simulation or study is sure enough to stop
    # By method: "looks" or "always" if intervals hold at several looks together; no entry if at one time only.
    valid: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def acf(self) -> float:
        """Return the average communication frequency T/t_T."""
        return self.num_rounds / self.num_steps

    @property
    def replications(self) -> int:
        """Return the number of replications."""
        return next(iter(self.methods.values())).estimate.shape[1]

    def method_named(self, method: str | None) -> str:
        """Return a method's name, the first if None; refuse one that the rows do not have."""
        if method is None:
            return next(iter(self.methods))
        return checks.choice("method", method, tuple(self.methods))

    def level_place(self, level: float | None) -> int:
        """Return the place of a level, of the first if None; refuse one that the rows do not have."""
        if level is None:
            return 0
        if level not in self.levels:
            raise refusal(
                "level", f"be one of {', '.join(map(str, self.levels))}", level, code="choice"
            )
        return self.levels.index(level)

    def coordinate_place(self, method: str, coordinate: str | int | None) -> int:
        """Return the place of a method's coordinate, given by name or number; of the first if None."""
        names = self.coordinates[method]
        if isinstance(coordinate, str):
            return names.index(checks.choice("coordinate", coordinate, names))
        return checks.count("coordinate", coordinate or 0, 0, len(names) - 1)

    def save(self, path: str | Path, *, force: bool = False) -> Path:
        """Write the rows to a file with a checksum inside, whole or not at all; see `load_cell`.

        Args:
          path: the file, such as "cell.npz".
          force: whether to replace an existing file.

        Returns:
          The path.
        """
        from jaxlsgd.core import cell_file

        return cell_file.save(self, path, force=force)

    def __repr__(self) -> str:
        where = f"{self.problem!r}, {self.algorithm!r}, {self.schedule!r}"
        some = f"replications={self.replications}, " if self.methods else ""
        return f"CellRows({where}, num_steps={self.num_steps}, {some}methods={list(self.methods)})"

    def plot(self, measure: str = "coverage", **options: Any) -> Any:
        """Return a Matplotlib figure of coverage or length by method; see `report.figures.plot`."""
        return later("report.figures", "plot")(self, measure, **options)

    def to_frame(self, rows: bool = False) -> Any:
        """Return a `pandas.DataFrame` of measures, or of the rows themselves; see `report.export.to_frame`."""
        return later("report.export", "to_frame")(self, rows)

    def table(self) -> Table:
        """Return what the rows are, as a table; `print(cell)` and a notebook show it."""
        if not self.methods:
            return facts(
                "cell", "without rows", [("problem", self.problem), ("schedule", self.schedule)]
            )
        name, level = next(iter(self.methods)), f"{100 * self.levels[0]:g} %"
        where = self.coordinates[name][0]
        title = (
            f"{self.problem}, {self.algorithm}, {self.schedule}, {self.num_steps:,} observations per "
            f"client in {self.num_rounds:,} rounds: {self.replications:,} replications, {where}"
        )
        header = ["method", "completed", "truth", "mean estimate", f"mean length, {level}"]
        lines = [self._line(name) for name in self.methods]
        note = "Coverage, with standard errors: jaxlsgd.measures.coverage_table(cell)."
        return Table(title, header, lines, (0,), (note,))

    def _line(self, name: str) -> list[str]:
        """Return a line of the table: a method's first coordinate at the last round."""
        rows, truth = self.methods[name], self.truth[name]
        ok = rows.ok[-1]
        error = self.truth_error.get(name)
        known = "-" if truth is None else f"{truth[0]:.4g}"
        known += "" if error is None else f" ± {error[0]:.2g}"
        if not ok.any():
            return [name, "0", known, "-", "-"]
        means = rows.estimate[-1, ok, 0].mean(), 2 * rows.half_width[-1, 0, ok, 0].mean()
        return [name, f"{ok.sum():,}", known, *(f"{x:.4g}" for x in means)]


def cells_of(source: Any) -> list[CellRows]:
    """Return the cells of `CellRows`, of a sequence of them, or of the results of a study."""
    found = source.read_all() if hasattr(source, "read_all") else source
    iterable = isinstance(found, Iterable)
    cells = [cell for cell in found if cell is not None] if iterable else [found]
    if not all(isinstance(cell, CellRows) for cell in cells):
        raise refusal("cells", "be CellRows or the results of a study", source, code="type")
    return cells
