"""Options of a fit, checked. `fit_table` declares them with their types, defaults and meaning."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxlsgd.core import checks
from jaxlsgd.core.algorithm import check_measure
from jaxlsgd.core.checks import refusal
from jaxlsgd.core.estimator import Estimator
from jaxlsgd.engine.machine import memory
from jaxlsgd.inference.one_step import one_step
from jaxlsgd.inference.plug_in import plug_in
from jaxlsgd.inference.random_scaling import random_scaling
from jaxlsgd.regression.families import FAMILIES, Family, family_of

CHOICES = {
    "family": FAMILIES,
    "missing": ("refuse", "drop"),
    "target": ("population", "sample"),
    "rows": ("reused", "fresh"),
    "variance": ("clients", "pooled", "HC0", "HC1", "HC3", "CR1"),
    "clients": ("given", "sampled"),
    "weights": ("size", "equal"),
}
# Which family takes an option.
_OF_FAMILY = {
    "tau": "quantile",
    "bandwidth": "quantile",
    "delta": "huber",
    "dispersion": "negative_binomial",
}
METHODS = {
    method.name: method
    for method in (
        one_step(gradients="increments", name="one_step"),
        plug_in("finite"),
        random_scaling(critical="schedule"),
    )
}
NEWTON = "newton"  # what the table of a fit without methods is called
MANY_COLUMNS = 64  # above which a run reads its estimate once, and memory is checked
MOST_COLUMNS = 1000  # d: a run of 20 passes has 2,000 rounds, and needs two per column
MOST_FOR_NEWTON = 10_000
STEPS = 100  # per pass: that many batches of every client


@dataclasses.dataclass(frozen=True)
class Options:
    """Checked options of a fit."""

    family: Family
    target: str
    rows: str
    variance: str
    clients: str
    weights: str
    ridge: float
    level: float
    methods: tuple[Estimator, ...]
    by_default: bool  # whether no methods were given
    local_steps: int | None
    share: float
    max_passes: int
    seed: int
    until: float | None

    @property
    def fresh(self) -> bool:
        """Whether each row is met once, so that the noise of the run is that of the sample."""
        return self.rows == "fresh"

    @property
    def first(self) -> str:
        """The name of the first method."""
        return self.methods[0].name if self.methods else NEWTON


def check_options(given: Mapping[str, Any]) -> Options:
    """Check the arguments of `fit_table`, by name; those that are about columns are checked by `design`."""
    for name, known in CHOICES.items():
        checks.choice(name, given[name], known)
    if given["local_steps"] is not None:
        checks.count("local_steps", given["local_steps"], 1, STEPS)
    if given["rows"] == "fresh" and given["target"] == "sample":
        rule = "be reused for the sample: one pass over fresh rows estimates the population, not the minimiser of these rows"
        raise refusal("rows", rule, given["rows"], code="conflict")
    if given["rows"] == "fresh" and given["variance"] != "clients":
        rule = "be clients for fresh rows, whose spread is the run's own"
        raise refusal("variance", rule, given["variance"], code="conflict")
    if given["clients"] == "sampled":
        _check_sampled(given)
    elif given["variance"] == "CR1":
        raise refusal(
            "variance", "be another than CR1 without clients='sampled'", "CR1", code="conflict"
        )
    if given["exposure"] is not None and given["family"] not in ("poisson", "negative_binomial"):
        rule = "be left out unless the family is poisson or negative_binomial"
        raise refusal("exposure", rule, given["exposure"], code="unwanted")
    for name, family in _OF_FAMILY.items():
        if given[name] is not None and given["family"] != family:
            rule = f"be left out unless the family is {family}"
            raise refusal(name, rule, given[name], code="unwanted")
    by_default = given["methods"] is None
    needs_run = given["target"] == "sample" or given["rows"] == "fresh"
    listed = list(given["methods"] or ()) if not by_default else ["one_step"] * needs_run
    if listed:
        checks.sequence("methods", listed, "method")
    elif needs_run:
        rule = (
            "have one for these rows alone, or for one pass: Newton's steps have no error of a run"
        )
        raise refusal("methods", rule, listed, code="missing")
    methods = tuple(_method(one) for one in listed)
    checks.distinct("methods", [method.name for method in methods], named=True)
    family = family_of(
        given["family"],
        **{name: given[name] for name in _OF_FAMILY if given[name] is not None},
    )
    checked = {
        "family": family,
        "ridge": checks.scale("ridge", given["ridge"]),
        "level": checks.level(given["level"]),
        "methods": methods,
        "by_default": by_default,
        "share": checks.level(given["share"], "share"),
        "max_passes": checks.count("max_passes", given["max_passes"]),
        "seed": checks.count("seed", given["seed"], 0),
        "until": None if given["until"] is None else checks.positive("until", given["until"]),
    }
    fields = [field.name for field in dataclasses.fields(Options)]
    found = Options(**{name: checked[name] if name in checked else given[name] for name in fields})
    for method in methods:
        if found.target == "population" and not found.fresh and not method.standard_error:
            rule = (
                "give a standard error for the population: this one sees the run alone, and not the "
                "chance in which rows were sampled, unless each is met once (rows='fresh')"
            )
            raise refusal("methods", rule, method.name, code="unsupported")
    return found


def _check_sampled(given: Mapping[str, Any]) -> None:
    """Refuse what has no meaning if the clients are a sample of others."""
    if given["target"] == "sample":
        rule = "be given for the sample: its minimiser is that of these clients"
        raise refusal("clients", rule, "sampled", code="conflict")
    if given["rows"] == "fresh":
        rule = "be given for fresh rows, in one pass, which does not come back to a client's rows"
        raise refusal("clients", rule, "sampled", code="conflict")
    if given["variance"] not in ("clients", "CR1"):
        rule = "be clients or CR1 with clients='sampled', whose variance is between clients"
        raise refusal("variance", rule, given["variance"], code="conflict")
    if given["client"] is None:
        raise refusal("client", "be a column with clients='sampled'", None, code="missing")


def _method(given: str | Estimator) -> Estimator:
    if isinstance(given, Estimator):
        return given
    return METHODS[checks.choice("methods", given, tuple(METHODS))]


def check_methods(methods: Sequence[Estimator], dim: int) -> None:
    """Refuse methods whose results cannot be read after a run in `dim` coordinates, before it."""
    for method in methods:
        if method.matrix is None:
            rule = "have a matrix, to go back to the scale of the table"
            raise refusal("methods", rule, method.name, code="unsupported")
        if method.contrasts:
            rule = "be for the coefficients and not for contrasts; see TableFit.function"
            raise refusal("methods", rule, method.name, code="unsupported")
        check_measure(method, dim, "float32")


def check_columns(rows: int, dim: int, clients: int, options: Options) -> None:
    """Refuse more columns than a run can be made with, and than memory has room for."""
    if dim > MOST_COLUMNS and options.methods:
        what = f"{dim:,} with methods {', '.join(one.name for one in options.methods)}"
        hint = "; without methods, Newton's steps allow 10,000; or choose columns"
        rule = f"be at most {MOST_COLUMNS:,} for a run, which needs rounds in proportion"
        raise refusal("columns", rule, what, hint, code="data")
    if dim > MOST_FOR_NEWTON:
        rule = f"be at most {MOST_FOR_NEWTON:,}: Hessians of d² numbers are inverted"
        raise refusal("columns", rule, dim, "; choose columns", code="data")
    if dim <= MANY_COLUMNS:
        return
    # Messages of all clients have two matrices, which are kept and stacked; beside them a dozen more.
    need, room = 8 * dim * (dim * (5 * clients + 12) + 4 * rows), memory()
    if room is not None and need > room:
        rule = f"be so few that their matrices and rows fit in the {room / 2**30:.2g} GiB of memory"
        what = f"{dim:,} columns of {clients:,} clients, about {need / 2**30:.2g} GiB"
        raise refusal("columns", rule, what, "; choose columns, or larger clients", code="memory")


def no_interval(name: str, reason: str, options: Options, stream: bool = False) -> checks.Refusal:
    """Return the error of a run that has failed its own test, with the call that works."""
    call = "leave methods out: Newton's method is exact for these rows"
    if stream:
        call = "stream=False without methods reads the file whole, and fits it by Newton's method"
    elif options.target == "sample":
        call = "target='population' without methods finds the minimiser of these rows, by Newton's method"
    elif options.fresh:
        call = "rows='reused' without methods fits these rows by Newton's method"
    text = f"methods: {name} reports no interval, as {reason}. What works: {call}"
    return checks.Refusal(text, "methods", "data")
