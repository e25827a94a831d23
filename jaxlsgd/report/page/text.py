"""Sentences of the page: the findings, each with its Monte-Carlo error, and the question of the study."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Any

import numpy as np

from jaxlsgd.core.display import plural, with_error
from jaxlsgd.core.rows import CellRows
from jaxlsgd.report.figures import method_labels
from jaxlsgd.report.page import data
from jaxlsgd.report.page.data import Average
from jaxlsgd.study.parts import ProblemPart, thawed
from jaxlsgd.study.study import Study

Setting = tuple[str, str, int]  # problem, algorithm, steps
# One method's verb, and that of several.
_VERBS = {
    "keeps": ("keeps", "keep"),
    "falls short of": ("falls short of", "fall short of"),
    "exceeds": ("exceeds", "exceed"),
}
_SIZE = 0.05  # chance that a method with exact intervals is reported not to keep its level


@dataclasses.dataclass(frozen=True)
class View:
    """One method in one cell, at the last round, the first level and the first coordinate."""

    setting: Setting
    schedule: str
    acf: float
    sent: float | None  # over plain Local SGD's under C1
    coverage: Average | None
    length: Average | None  # of its logarithm
    completed: int


def unambiguous(labels: Mapping[str, str]) -> dict[str, str]:
    """Return the labels of methods, with the name added if two have the same label."""
    return method_labels([{"method": name, "label": label} for name, label in labels.items()])


class Findings:
    """Collects the cells of a study, and describes what they show."""

    def __init__(self, level: float) -> None:
        self.level = level
        self._labels: dict[str, str] = {}
        self._views: dict[str, dict[tuple[Setting, str], View]] = {}

    def add(self, cell: CellRows) -> None:
        """Add a cell."""
        setting = (cell.problem, cell.algorithm, cell.num_steps)
        self._labels |= cell.labels
        for name, rows in cell.methods.items():
            ok, truth = rows.ok[-1], cell.truth[name]
            half = rows.half_width[-1, 0, :, 0]
            coverage = None
            if truth is not None:
                with np.errstate(invalid="ignore"):
                    hits = np.abs(rows.estimate[-1, :, 0] - truth[0]) <= half
                coverage = data.share(hits, ok)
            length = data.log_mean(np.where(ok, 2 * half, 0.0), ok)
            counted = name in cell.numbers_sent
            sent = cell.numbers_sent[name][-1] / cell.sent_under_c1[-1] if counted else None
            view = View(setting, cell.schedule, cell.acf, sent, coverage, length, int(ok.sum()))
            self._views.setdefault(name, {})[setting, cell.schedule] = view

    def sentences(self) -> list[tuple[str, str]]:
        """Return headings and sentences on level, length and communication; none without rows."""
        parts = (
            ("Level", self._level_sentence()),
            ("Length", self._length_sentence()),
            ("Communication", self._communication_sentence()),
        )
        return [(heading, text) for heading, text in parts if text]

    def verdicts(self) -> dict[str, str]:
        """Return for each method with a known coverage "keeps", "falls short of" or "exceeds" its level."""
        found = {}
        for name in self._views:
            scores = [score for score, _ in self._scores(name)]
            if scores:
                limit = _limit(len(scores))
                below, above = min(scores) < -limit, max(scores) > limit
                found[name] = "falls short of" if below else "exceeds" if above else "keeps"
        return found

    def _scores(self, name: str) -> list[tuple[float, View]]:
        """Return deviations from the level, in the standard errors that exact intervals would have."""
        spread = math.sqrt(self.level * (1 - self.level))
        return [
            ((view.coverage.value - self.level) * math.sqrt(view.completed) / spread, view)
            for view in self._views[name].values()
            if view.coverage is not None
        ]

    def _level_sentence(self) -> str:
        verdicts = self.verdicts()
        if not verdicts:
            known = any(v.length for views in self._views.values() for v in views.values())
            return "Coverage is unknown: no problem has a truth." if known else ""
        groups = []
        for verdict, (one, many) in _VERBS.items():
            if names := [name for name, found in verdicts.items() if found == verdict]:
                covers = _joined([self._one_level(name, verdict) for name in names])
                verb = many if len(names) > 1 else one
                groups.append(f"{covers}, which {verb} {100 * self.level:g} %")
        count = max(len(self._scores(name)) for name in verdicts)
        limit = _limit(count)
        start = f"On average over {count:,} cells, " if count > 1 else ""
        which = f"any of {count:,} cells" if count > 1 else "a cell"
        return _capital(
            f"{start}{'; '.join(groups)}. A deviation of {which} by up to {limit:.1f} standard errors "
            f"({self._points(limit)} points) is put down to chance."
        )

    def _one_level(self, name: str, verdict: str) -> str:
        scores = self._scores(name)
        mean = data.over([view.coverage for _, view in scores if view.coverage is not None])
        text = f"{self._name(name)} covers {_percent(mean)}"
        if len(scores) > 1 and verdict != "keeps":
            above = verdict == "exceeds"
            view = (max if above else min)(scores, key=lambda pair: pair[0])[1]
            if view.coverage is not None:
                end = "highest" if above else "lowest"
                text += f" [{end} {_percent(view.coverage)}: {_place(view)}]"
        return text

    def _name(self, name: str) -> str:
        label = unambiguous(self._labels)[name]
        return f"“{label}”" if "," in label else label

    def _points(self, limit: float) -> str:
        fewest = [view.completed for name in self._views for _, view in self._scores(name)]
        error = math.sqrt(self.level * (1 - self.level) / min(fewest))
        return f"{100 * limit * error:.1f}"

    def _length_sentence(self) -> str:
        shared = self._shared()
        if not shared or len(self._views) < 2:
            return ""
        lengths = {name: _over_cells(views, shared) for name, views in self._views.items()}
        keepers = [name for name, verdict in self.verdicts().items() if verdict == "keeps"]
        base = min(keepers or lengths, key=lambda name: lengths[name].value)
        others = [name for name in lengths if name != base]
        texts = [
            f"{self._name(name)} {_ratio(lengths[name] - lengths[base])}"
            for name in sorted(others, key=lambda name: lengths[name].value)
        ]
        which = " of those that keep their level" if keepers else ""
        return (
            f"The shortest intervals{which} are those of {self._name(base)}; as multiples of their "
            f"mean length, averaged over {plural(len(shared), 'cell')}, the others are: {', '.join(texts)}."
        )

    def _shared(self) -> list[tuple[Setting, str]]:
        """Return cells that have all methods, each with a length."""
        lengths = [
            {place for place, view in views.items() if view.length is not None}
            for views in self._views.values()
        ]
        first = next(iter(self._views.values()), {})
        return [place for place in first if all(place in found for found in lengths)]

    def _communication_sentence(self) -> str:
        texts, ends, sent = [], [], []
        for name, views in self._views.items():
            pairs = _extremes([view for view in views.values() if view.length is not None])
            if not pairs:
                continue
            gaps = [
                rare.length - often.length for often, rare in pairs if often.length and rare.length
            ]
            texts.append(f"{self._name(name)} {_ratio(data.over(gaps))}")
            ends += [often.acf / rare.acf for often, rare in pairs]
            shares = [rare.sent for _, rare in pairs if rare.sent is not None]
            sent += [f"{self._name(name)} {_span(shares)}"] if shares else []
        if not texts:
            return ""
        text = (
            f"Communicating {_span(ends)} times less often, from the schedule with the most rounds to the one "
            f"with the fewest, multiplies the mean length by: {', '.join(texts)}."
        )
        return text + (
            " With the fewest rounds a client sends so many numbers, gradients and Hessians among them, as "
            f"multiples of those of plain Local SGD under C1: {', '.join(sent)}."
            if sent
            else ""
        )


def _span(values: Sequence[float]) -> str:
    return " to ".join(dict.fromkeys(f"{value:.3g}" for value in (min(values), max(values))))


def _extremes(views: Sequence[View]) -> list[tuple[View, View]]:
    """Return for each setting the schedules with the most and the fewest rounds."""
    settings: dict[Setting, list[View]] = {}
    for view in views:
        settings.setdefault(view.setting, []).append(view)
    ends = [
        (max(group, key=lambda v: v.acf), min(group, key=lambda v: v.acf))
        for group in settings.values()
    ]
    return [(often, rare) for often, rare in ends if often.acf > rare.acf]


def _over_cells(
    views: Mapping[tuple[Setting, str], View], shared: Sequence[tuple[Setting, str]]
) -> Average:
    lengths = [views[place].length for place in shared]
    return data.over([length for length in lengths if length is not None])


def _limit(count: int) -> float:
    """Return Bonferroni's bound, which holds under any dependence between cells."""
    return NormalDist().inv_cdf(1 - _SIZE / (2 * count))


def _joined(texts: Sequence[str]) -> str:
    return " and ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)


def _percent(x: Average) -> str:
    value, _, error = with_error(100 * x.value, 100 * x.error).partition(" ")
    # At 100 % the error is 0 by its formula, so it is left out.
    return f"{value} % {error}" if x.error > 0 else f"{100 * x.value:.1f} %"


def _ratio(x: Average) -> str:
    ratio = math.exp(x.value)
    # The error of lengths in a fixed proportion is rounding.
    return with_error(ratio, ratio * x.error) if x.error > 1e-12 else f"{ratio:.4g}"


def _place(view: View) -> str:
    problem, algorithm, steps = view.setting
    other = "" if algorithm == "local_sgd" else f", {algorithm}"
    return f"{problem}{other}, {view.schedule}, {steps:,} steps"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


_MOST = 12  # names that are written out


def question(
    study: Study,
    labels: Mapping[str, str],
    coordinates: Sequence[str],
    truths: Sequence[str] = (),
) -> list[tuple[str, list[str]]]:
    """Return headings with their lines, on the design of a study.

    Args:
      study: what was run.
      labels: labels of the methods.
      coordinates: names of the coordinates that have intervals; none before the first rows.
      truths: notes on the errors of truths that were estimated.
    """
    return [
        ("Aims", [_aim(study)]),
        ("Data-generating mechanisms", _mechanisms(study)),
        ("Estimands", [_estimand(coordinates), *truths]),
        ("Methods", _methods(study, labels)),
        ("Performance measures", [_measures(study)]),
    ]


def _aim(study: Study) -> str:
    levels = " and ".join(f"{100 * level:g} %" for level in study.levels)
    who = f"{len(study.methods)} methods" if len(study.methods) > 1 else "one method"
    text = f"Whether {levels} intervals of {who} hold the truth as often as they claim, and how long they are"
    return text + (", as clients communicate less often." if len(study.schedules) > 1 else ".")


def _mechanisms(study: Study) -> list[str]:
    lines = [_problem(part) for part in study.problems[:_MOST]]
    left = len(study.problems) - _MOST
    lines += [f"and {left} more problems"] if left > 0 else []
    lines.append("Local steps per round: " + _listed([part.name for part in study.schedules]))
    units = {"num_steps": "observations per client", "num_rounds": "rounds"}
    extents = [f"{extent.count:,} {units[extent.unit]}" for extent in study.horizons]
    if extents:
        lines.append("Horizons: " + _listed(extents))
    algorithms = [part.name for part in study.algorithms]
    if algorithms != ["local_sgd"]:
        lines.append("Algorithms: " + _listed(algorithms))
    runs, cells = f"{study.replications:,} independent replications", len(study.cells)
    runs += f" of {cells:,} cells, which see the same draws" if cells > 1 else ""
    lines.append(f"{runs} (seed {study.seed}, {study.dtype})")
    return lines


def _problem(part: ProblemPart) -> str:
    facts = f"{part.fact('dim')} parameters, {part.fact('num_clients')} clients"
    given = {key: thawed(value) for key, value in part.arguments}
    other = [f"{key} {_short(x)}" for key, x in given.items() if key not in ("dim", "num_clients")]
    step = f"step {part.gamma0:g}/m^{part.alpha:g}"
    kind = f" ({part.kind})" if part.kind and part.kind != part.name else ""
    return f"{part.name}{kind}: " + ", ".join([facts, *other, step])


def _estimand(coordinates: Sequence[str]) -> str:
    if not coordinates:
        return "The minimiser of the average loss, coordinate by coordinate."
    text = f"The minimiser of the average loss: {_listed(coordinates)}."
    return text + (f" Figures and tables show {coordinates[0]}." if len(coordinates) > 1 else "")


def _methods(study: Study, labels: Mapping[str, str]) -> list[str]:
    names = [(part.name, labels.get(part.name, part.name)) for part in study.methods]
    return [label if label == name else f"{label}: {name}" for name, label in names]


def _measures(study: Study) -> str:
    rounds = " along the communication rounds" if study.save_at else ""
    return (
        f"Coverage and mean length{rounds}, bias, root mean square error and the bias of the standard "
        "error, each with its Monte-Carlo standard error; failed replications are counted, never replaced."
    )


def _listed(names: Sequence[str]) -> str:
    left = len(names) - _MOST
    return ", ".join(names[:_MOST]) + (f" and {left} more" if left > 0 else "")


def _short(value: Any) -> str:
    text = str(value["kind"] if isinstance(value, dict) else value)  # a problem within a problem
    return text if len(text) <= 40 else text[:37] + "..."
