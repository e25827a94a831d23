"""What the page says: the headline, over all coordinates and cell by cell, and the question of the study."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Any, NamedTuple

from jaxlsgd.analysis.measures import LOCAL_SGD
from jaxlsgd.analysis.moments import wilson
from jaxlsgd.core.display import fraction, plural
from jaxlsgd.report.figures import method_labels
from jaxlsgd.report.page.data import View
from jaxlsgd.study.parts import ProblemPart, thawed
from jaxlsgd.study.study import Study

_SIZE = 0.05  # chance that a method with exact intervals has a mark in any of the cells shown
MOST_CELLS = 60  # lines of the headline
_STEPS = ((15, 4), (5, 3), (2, 2))  # points below the level, and the shade
UNKNOWN = "–"


class Entry(NamedTuple):
    """A method in a cell: coverage and relative length as text, and `b1` to `b4`, `a` or `k` as its shade."""

    coverage: str
    length: str
    shade: str


class Headline(NamedTuple):
    """Coverage at one level, mean over all coordinates, of every cell and method.

    `summary` has a line per method with an entry per algorithm; `cells` has the name of each problem,
    algorithm and horizon with its schedules, and an entry per method. `assets/headline.js` computes the
    same for what the reader chooses.
    """

    scope: str
    methods: list[str]
    algorithms: list[str]
    summary: list[list[str]]
    cells: list[tuple[str, list[tuple[str, list[Entry | None]]]]]
    limit: float


def headline(
    cells: Sequence[dict[str, Any]],
    views: Sequence[Mapping[int, View]],
    methods: Sequence[str],
    level: float,
) -> Headline:
    """Return what came out, without any average over cells.

    Args:
      cells: problem, algorithm, schedule and steps of each.
      views: of each cell, by the index of the method.
      methods: labels.
      level: of the views.
    """
    known = [sum(i in here and here[i].known for here in views) for i in range(len(methods))]
    limit = _limit(max(1, *known))
    algorithms = list(dict.fromkeys(cell["algorithm"] for cell in cells))
    summary = []
    for i in range(len(methods)):
        own = [
            (cell["algorithm"], here[i])
            for cell, here in zip(cells, views, strict=True)
            if i in here
        ]
        line = [[view for name, view in own if name == algorithm] for algorithm in algorithms]
        summary.append([_kept(group, level, limit) for group in line])
    several = algorithms != [LOCAL_SGD]
    groups: dict[str, list[tuple[str, list[Entry | None]]]] = {}
    for cell, here in zip(cells, views, strict=True):
        name = setting_name(cell, several)
        line = _line(here, len(methods), level, limit)
        groups.setdefault(name, []).append((cell["schedule"], line))
    counts = [view.coordinates for here in views for view in here.values()]
    ends = " to ".join(map(str, sorted({min(counts, default=1), max(counts, default=1)})))
    which = "one coordinate" if ends == "1" else f"mean over all {ends} coordinates"
    scope = f"{100 * level:g} % intervals, {which}, {plural(len(cells), 'cell')}."
    if cells and not any(known):
        scope += " Coverage is unknown: no problem has a truth."
    return Headline(scope, list(methods), algorithms, summary, list(groups.items()), limit)


def setting_name(cell: Mapping[str, Any], several: bool) -> str:
    """Return problem, algorithm and horizon of a cell."""
    parts = [cell["problem"], *([cell["algorithm"]] if several else []), f"{cell['steps']:,} steps"]
    return ", ".join(parts)


def _line(here: Mapping[int, View], count: int, level: float, limit: float) -> list[Entry | None]:
    fair = [
        view.length
        for view in here.values()
        if view.length > 0 and not score(view, level) < -limit  # also if coverage is unknown
    ]
    base = min(fair, default=math.nan)
    return [_entry(here[i], base, level, limit) if i in here else None for i in range(count)]


def _entry(view: View, base: float, level: float, limit: float) -> Entry:
    return Entry(share_text(view), _ratio_text(view, base), _shade(view, level, limit))


def _shade(view: View, level: float, limit: float) -> str:
    apart = score(view, level)
    if math.isnan(apart):
        return ""
    if apart > limit:
        return "a"
    if apart >= -limit:
        return "k"
    points = 100 * (level - view.coverage)
    return f"b{next((shade for least, shade in _STEPS if points > least), 1)}"


def _kept(group: Sequence[View], level: float, limit: float) -> str:
    """Return in how many cells a method keeps its level, and its lowest and highest coverage."""
    known = [view for view in group if view.known]
    if not known:
        return UNKNOWN
    kept = sum(abs(score(view, level)) <= limit for view in known)
    ends = [find(known, key=lambda view: view.coverage) for find in (min, max)]
    span = " to ".join(dict.fromkeys(_rounded(100 * x.coverage, 100 * x.error) for x in ends))
    return f"{kept} of {len(known)}: {span} %"


def score(view: View, level: float) -> float:
    """Return the deviation from the level, in the standard errors that exact intervals would have.

    Those are √(level (1 − level)/n), smaller for a mean over coordinates in the proportion that its
    estimated standard error has to that of one coordinate, √(p (1 − p)/n).
    """
    p, shrink = view.coverage, 1.0
    if 0 < p < 1 and view.error > 0:
        shrink = view.error * math.sqrt(view.n / (p * (1 - p)))
    error = math.sqrt(level * (1 - level) / max(1, view.n)) * shrink
    return (p - level) / error


def share_text(view: View) -> str:
    """Return a coverage in per cent, with as many digits as its error supports."""
    p, error = 100 * view.coverage, 100 * view.error
    if not view.known:
        return UNKNOWN
    if error > 0:
        return f"{_rounded(p, error)} ({_rounded(error, error)})"
    low, high = (100 * float(x) for x in wilson(view.coverage * view.n, view.n))
    return f"{p:.0f} [{low:.1f}, {high:.1f}]"


def _ratio_text(view: View, base: float) -> str:
    ratio = view.length / base
    if not math.isfinite(ratio):
        return ""
    return f"×{_rounded(ratio, max(0.005, ratio * view.length_error / view.length))}"


def _rounded(value: float, error: float) -> str:
    """Return a number to the first digit of its error, or the second if that is 1; at most two decimals."""
    places = min(2, max(0, -math.floor(math.log10(error / 2)))) if error > 0 else 1
    return f"{value:.{places}f}"


def _limit(count: int) -> float:
    """Return Bonferroni's bound, which holds under any dependence between cells."""
    return NormalDist().inv_cdf(1 - _SIZE / (2 * count))


def unambiguous(labels: Mapping[str, str]) -> dict[str, str]:
    """Return the labels of methods, with the name added if two have the same label."""
    return method_labels([{"method": name, "label": label} for name, label in labels.items()])


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
      truths: notes on the truths' own errors.
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
    facts = f"{part.fact('dim')} parameters, {part.fact('num_clients')} clients, {_weights(part)}"
    given = {key: thawed(value) for key, value in part.arguments}
    said = ("dim", "num_clients", *(["weights"] if _listed_weights(given) else []))
    other = [f"{key} {_short(x)}" for key, x in given.items() if key not in said]
    step = (
        f"step {part.gamma0:g}/m^{part.alpha:g}" if part.alpha else f"constant step {part.gamma0:g}"
    )
    kind = f" ({part.kind})" if part.kind and part.kind != part.name else ""
    return f"{part.name}{kind}: " + ", ".join([facts, *other, step])


def _weights(part: ProblemPart) -> str:
    """Describe the clients' weights p_k, which the truth depends on."""
    given = {key: thawed(value) for key, value in part.arguments}
    while isinstance(given.get("problem"), dict):  # a problem within a problem
        given = given["problem"]
    if weights := _listed_weights(given):
        shown = ", ".join(f"{float(fraction(x)):.3g}" for x in weights[:_MOST])
        return f"client weights {shown}" + (", …" if len(weights) > _MOST else "")
    return "client weights as its code has them" if part.identity else "equal client weights"


def _listed_weights(given: Mapping[str, Any]) -> Sequence[Any]:
    weights = given.get("weights")
    return weights if isinstance(weights, (list, tuple)) else ()


def _estimand(coordinates: Sequence[str]) -> str:
    if not coordinates:
        return "The minimiser of the clients' weighted average loss, coordinate by coordinate."
    return f"The minimiser of the clients' weighted average loss: {_listed(coordinates)}."


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
