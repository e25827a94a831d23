"""What was asked, under the headings of ADEMP, from the study alone.

Reference: Morris, White and Crowther (2019), Statistics in Medicine 38: aims, data-generating mechanisms,
estimands, methods, performance measures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxlsgd.study.parts import Part, ProblemPart, thawed
from jaxlsgd.study.spec import Study

_MOST = 12  # names that are written out


def question(
    study: Study,
    labels: Mapping[str, str],
    coordinates: Sequence[str],
    truths: Sequence[str] = (),
) -> list[tuple[str, list[str]]]:
    """A heading and its lines each.

    Args:
      study: what was run.
      labels: methods as people write them.
      coordinates: names of the coordinates that have intervals; none before the first rows.
      truths: how well their true values are known, where those were estimated.
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
    return [_method(part, labels.get(part.name, part.name)) for part in study.methods]


def _method(part: Part, label: str) -> str:
    return label if label == part.name else f"{label}: {part.name}"


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
