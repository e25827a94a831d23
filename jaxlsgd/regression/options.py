"""What a fit of a table is asked for, and what is refused at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxlsgd.core import checks
from jaxlsgd.core.algorithm import check_measure
from jaxlsgd.core.checks import refusal
from jaxlsgd.core.estimator import Estimator
from jaxlsgd.inference.one_step import one_step
from jaxlsgd.inference.plug_in import plug_in
from jaxlsgd.inference.random_scaling import random_scaling
from jaxlsgd.regression.losses import Family, family_of

TARGETS = ("population", "sample")
ROWS = ("reshuffled", "one pass")
VARIANCES = ("clients", "pooled")
WEIGHTS = ("size", "equal")
METHODS = {
    method.name: method
    for method in (one_step(), plug_in("finite"), random_scaling(critical="schedule"))
}
STEPS = 100  # a pass: that many batches of every client


@dataclasses.dataclass(frozen=True)
class Options:
    """What a fit is asked for, checked."""

    family: Family
    target: str
    rows: str
    variance: str
    weights: str
    ridge: float
    level: float
    methods: tuple[Estimator, ...]
    local_steps: int | None
    share: float
    max_passes: int
    seed: int

    @property
    def fresh(self) -> bool:
        """Whether the run's noise is that of the sample: each row is met once."""
        return self.rows == "one pass"


def options(
    family: str = "gaussian",
    *,
    target: str = "population",
    rows: str = "reshuffled",
    variance: str = "clients",
    weights: str = "size",
    ridge: float = 0.0,
    level: float = 0.95,
    methods: Sequence[str | Estimator] = ("one_step",),
    local_steps: int | None = None,
    share: float = 0.05,
    max_passes: int = 60,
    seed: int = 0,
    tau: float = 0.5,
    delta: float | None = None,
    bandwidth: float | None = None,
) -> Options:
    """Checks what a fit is asked for; see `fit_table`."""
    checks.choice("target", target, TARGETS)
    checks.choice("rows", rows, ROWS)
    checks.choice("variance", variance, VARIANCES)
    checks.choice("weights", weights, WEIGHTS)
    if local_steps is not None:
        checks.count("local_steps", local_steps, 1, STEPS)
    if target == "sample" and rows == "one pass":
        rule = "be reshuffled for the sample: one pass says nothing about rows it meets once"
        raise refusal("rows", rule, rows)
    if variance == "pooled" and rows == "one pass":
        rule = "be clients in one pass, whose spread is the run's own"
        raise refusal("variance", rule, variance)
    chosen = tuple(_method(one) for one in checks.sequence("methods", list(methods), "method"))
    checks.distinct("methods", [method.name for method in chosen])
    found = Options(
        family_of(family, tau=tau, delta=delta, bandwidth=bandwidth),
        target,
        rows,
        variance,
        weights,
        checks.scale("ridge", ridge),
        checks.level(level),
        chosen,
        local_steps,
        checks.level(share, "share"),
        checks.count("max_passes", max_passes),
        checks.count("seed", seed, 0),
    )
    for method in chosen:
        if target == "population" and not found.fresh and not method.standard_error:
            rule = (
                "give a standard error for the population: this one sees the run alone, and not the "
                "chance in which rows were sampled, unless each is met once (rows='one pass')"
            )
            raise refusal("methods", rule, method.name)
    return found


def _method(given: Any) -> Estimator:
    if isinstance(given, Estimator):
        return given
    return METHODS[checks.choice("methods", given, tuple(METHODS))]


def check_methods(methods: Sequence[Estimator], dim: int) -> None:
    """Refuses methods whose results cannot be read after a run in `dim` coordinates, before it."""
    for method in methods:
        if method.matrix is None:
            rule = "have a matrix, to go back to the scale of the table"
            raise refusal("methods", rule, method.name)
        if method.contrasts:
            rule = (
                "be for the coefficients and not for contrasts, for which there is result.function"
            )
            raise refusal("methods", rule, method.name)
        check_measure(method, dim, "float32")
