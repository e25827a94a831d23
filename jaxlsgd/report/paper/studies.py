"""The two studies behind the paper's tables and figures, both made from `paper.toml`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxlsgd.report.paper.numbers import METHODS
from jaxlsgd.report.paper.targets import FIGURES
from jaxlsgd.schedules import Schedule, power_decay
from jaxlsgd.study import spec
from jaxlsgd.study.spec import Study
from jaxlsgd.study.store.codec import StoreError
from jaxlsgd.study.store.reader import Results

PAPER = Path(spec.__file__).with_name("paper.toml")
_POINTS = 25  # of a figure's curve


class Size(NamedTuple):
    """What a reproduction may change of `paper.toml`."""

    horizons: tuple[int, ...]  # t_T
    replications: int
    seed: int


def folder(target: str) -> str:
    """Where the study behind a table or a figure is kept, below the directory of all targets."""
    return "study-figures" if target in FIGURES else "study-tables"


def study_of(target: str, size: Size) -> Study:
    """The study behind Table 3 or 4 or one of the figures."""
    return _for_figures(size) if target in FIGURES else _for_tables(size)


def _for_tables(size: Size) -> Study:
    study = Study.from_toml(PAPER)
    changes = {"replications": size.replications, "seed": size.seed}
    return dataclasses.replace(study, horizons=sorted(set(size.horizons)), **changes)


def _for_figures(size: Size) -> Study:
    """The same problems and schedules along their paths, with the paper's own methods.

    All schedules make as many rounds T as the one that uses the most observations per round can make
    of the longest horizon. The finite-horizon methods would have to be computed anew at every point.
    """
    study = _for_tables(size)
    step = power_decay(1.0)  # of any size: it does not decide the number of rounds
    bare = [schedule.with_warmup(0.0) for schedule in study.schedules]
    rounds = min(s.plan(step, num_steps=max(size.horizons)).num_rounds for s in bare)
    first = round(study.schedules[0].warmup * rounds)
    return dataclasses.replace(
        study,
        schedules=[_warmed(schedule, rounds) for schedule in study.schedules],
        horizons=[{"num_rounds": rounds}],
        methods=[method for method in study.methods if method.name in METHODS],
        save_at=_points(first, rounds),
    )


def _warmed(schedule: Schedule, rounds: int) -> Schedule:
    """The schedule with its warm-up as a share of the rounds: in a figure, whose axis they are.

    The share of the observations that `with_warmup` takes is the one that comes to as many rounds.
    """
    first = round(schedule.warmup * rounds)
    steps = first + int(schedule.intervals(rounds - first).sum())
    return schedule.with_warmup(first / steps)


def _points(first: int, rounds: int) -> list[int]:
    """Rounds evenly spaced on a logarithmic axis, from a quarter of the warm-up on."""
    start = min(rounds, max(2, first // 4))
    return np.unique(np.geomspace(start, rounds, _POINTS).round().astype(int)).tolist()


def refuse_another(place: Path, study: Study) -> None:
    """Refuses a directory that holds another study, in terms of what `reproduce` was asked for."""
    if not (place / "manifest.json").is_file():
        return
    there = Results(place).study
    if there.digest == study.digest:
        return
    old, new = _size_text(there), _size_text(study)
    held = f"one with {old}, not with {new}" if old != new else "one made from another paper.toml"
    raise StoreError(f"{place} holds another study, {held}; give another --out, or delete {place}")


def _size_text(study: Study) -> str:
    return f"seed {study.seed} and horizons {', '.join(map(str, study.horizons))}"
