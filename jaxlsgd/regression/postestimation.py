"""What is computed from a fit: predictions, ratios, margins, joint tests, goodness of fit.

`TableFit` has these as methods. Numbers of the fitted rows that they need are made once, by `details`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxlsgd.core import checks
from jaxlsgd.core.checks import refusal
from jaxlsgd.inference import joint
from jaxlsgd.inference.joint import JointTest
from jaxlsgd.inference.laws.standard import student
from jaxlsgd.regression import families
from jaxlsgd.regression.design import INTERCEPT, Design, as_frame, extra
from jaxlsgd.regression.options import Options
from jaxlsgd.regression.pilot import Whitened, minimise

if TYPE_CHECKING:
    from jaxlsgd.regression.result import TableFit

FloatArray = NDArray[np.floating[Any]]
RATIOS = {"logit": "odds ratio", "log": "rate ratio"}
KINDS = ("pandas", "polars", "arrow")
_COLUMNS_AT_ONCE = 64


class Details(NamedTuple):
    """Numbers of the fitted rows, or of the first rows of a stream, at the first method's estimate."""

    effect: FloatArray  # (d,) average marginal effects
    jacobian: FloatArray  # (d, d) their derivatives in the coefficients
    deviance: float
    null_deviance: float  # of the intercept alone
    pseudo_r2: float  # McFadden's if there is a likelihood, else 1 − deviance/null deviance
    log_likelihood: float  # NaN if there is none without a scale
    residual: float  # variance of a row about its mean, for the gaussian family
    first_rows: int  # how many they are of, if not of all; else 0


def details(
    plan: Design, options: Options, space: Whitened, theta: FloatArray, part: bool
) -> Details:
    """Compute the numbers of the rows of a pilot at θ; `part` says that a stream has more."""
    rows, family, tuning = space.rows, options.family, space.objective.tuning
    n, d = rows.X.shape
    frame, share = rows.coordinates, rows.shares
    z = rows.predictors(theta)
    mean, slope, bend = families.mean_of(family.link, z)
    X = rows.X * frame.scale + frame.center
    scale = frame.y_scale
    units = scale**2 if family.name != "quantile" else scale  # of the loss
    each = families.deviance(family, mean, rows.y, tuning)
    null = _null_mean(space, options)
    null_each = families.deviance(family, null, rows.y, tuning)
    total = rows.total or len(rows.y)
    deviance, null_deviance = (units * total * float(share @ one) for one in (each, null_each))
    likely = families.log_likelihood(family, mean, rows.y)
    llf = np.nan
    r2 = 1 - deviance / null_deviance if null_deviance > 0 else np.nan
    if likely is not None:
        llf = total * float(share @ likely)
        nothing = families.log_likelihood(family, null, rows.y)
        r2 = 1 - llf / (total * float(share @ np.asarray(nothing)))
    residual = scale**2 * float(share @ (rows.y - mean) ** 2) * n / max(n - d, 1)
    beta = frame.coefficients(theta)
    effect = float(share @ slope) * beta
    jacobian = float(share @ slope) * np.eye(d) + np.outer(beta, (share * bend) @ X)
    if family.link != "identity":
        _discrete(effect, jacobian, plan.names, X, beta, z, share, family.link)
    return Details(
        effect,
        jacobian,
        deviance,
        null_deviance,
        r2,
        llf,
        residual,
        n if part else 0,
    )


def _discrete(
    effect: FloatArray,
    jacobian: FloatArray,
    names: tuple[str, ...],
    X: FloatArray,
    beta: FloatArray,
    z: FloatArray,
    share: FloatArray,
    link: str,
) -> None:
    """Put the change of the mean from 0 to 1 in place of the derivative, for columns of 0 and 1."""
    groups: dict[str, list[int]] = {}
    for j, name in enumerate(names):
        if name != INTERCEPT and np.all(np.minimum(np.abs(X[:, j]), np.abs(X[:, j] - 1)) < 1e-9):
            of_factor = name.endswith("]") and ":" not in name
            groups.setdefault(name.partition("[")[0] if of_factor else name, []).append(j)
    for together in groups.values():
        rest = z - X[:, together] @ beta[together]  # at the reference level
        low, slope, _ = families.mean_of(link, rest)
        for start in range(0, len(together), _COLUMNS_AT_ONCE):
            chosen = together[start : start + _COLUMNS_AT_ONCE]
            high, steep, _ = families.mean_of(link, rest[:, None] + beta[chosen])
            effect[chosen] = share @ (high - low[:, None])
            jacobian[chosen] = (share[:, None] * (steep - slope[:, None])).T @ X
            jacobian[np.ix_(chosen, together)] = 0.0
            jacobian[chosen, chosen] = share @ steep


def _null_mean(space: Whitened, options: Options) -> FloatArray:
    """Return the fitted means of an intercept alone, with the offset of the rows."""
    rows = space.rows
    ones = np.ones((len(rows.y), 1))
    objective = space.objective._replace(ridge=np.zeros(1))
    if options.family.name == "gaussian":
        return np.full(len(rows.y), rows.shares @ rows.y)
    theta, _ = minimise(objective, ones, rows.y, rows.shares, (INTERCEPT,), rows.offset)
    z = theta[0] + (0.0 if rows.offset is None else rows.offset)
    return families.mean_of(options.family.link, np.broadcast_to(z, rows.y.shape))[0]


def predict(
    fit: TableFit,
    rows: Any,
    method: str | None,
    level: float | None,
    scale: str,
    interval: str,
) -> Any:
    """Return predictions for new rows; see `TableFit.predict`."""
    checks.choice("scale", scale, ("response", "linear"))
    checks.choice("interval", interval, ("mean", "row"))
    family = fit.family
    if interval == "row" and family.name != "gaussian":
        rule = (
            "be mean unless the family is gaussian: no other has a spread of rows about their mean"
        )
        raise refusal("interval", rule, interval, code="unsupported")
    frame = as_frame(rows)
    X, found = fit.plan.features(frame), fit.coefficients(method)
    offset = _offset_of_new(fit.plan, frame)
    z = X @ found.estimate + offset
    variance = np.einsum("ij,jk,ik->i", X, found.covariance, X)
    error = np.sqrt(np.maximum(variance, 0))
    wide = np.sqrt(variance + fit.details.residual) if interval == "row" else error
    half = found.multiplier(fit.level if level is None else level) * wide
    link = "identity" if scale == "linear" else family.link
    mean, slope, _ = families.mean_of(link, z)
    low, high = (families.mean_of(link, end)[0] for end in (z - half, z + half))
    name = "quantile" if family.name == "quantile" else "mean"
    columns = {
        name if scale == "response" else "linear": mean,
        "std_error": slope * error,
        "lower": low,
        "upper": high,
    }
    return as_kind(columns, kind_of(rows), getattr(frame, "index", None))


def _offset_of_new(plan: Design, frame: Any) -> FloatArray | float:
    for argument in ("offset", "exposure"):
        name = getattr(plan, argument)
        if name is not None and name not in frame.columns:
            hint = "; it was in the fit, and the mean of a row depends on it"
            raise refusal("rows", f"have the column of the {argument}", name, hint, code="missing")
    found = plan.offset_of(frame)
    return 0.0 if found is None else found


def kind_of(table: Any) -> str:
    """Return the kind of table that results for this one are made as."""
    module = type(table).__module__.partition(".")[0]
    return {"polars": "polars", "pyarrow": "arrow"}.get(module, "pandas")


def as_kind(columns: Mapping[str, Any], kind: str, index: Any = None) -> Any:
    """Return columns as a table of pandas, polars or Arrow."""
    checks.choice("kind", kind, KINDS)
    if kind == "pandas":
        return extra("pandas").DataFrame(dict(columns), index=index)
    if kind == "polars":
        return extra("polars").DataFrame(dict(columns))
    return extra("pyarrow").table(dict(columns))


def ratios(fit: TableFit, method: str | None, level: float | None) -> Any:
    """Return exp of coefficients and of the ends of their intervals; see `TableFit.ratios`."""
    if fit.family.link not in RATIOS:
        rule = "be logistic, poisson or negative_binomial for odds and rate ratios"
        raise refusal("family", rule, fit.family.name, code="unsupported")
    estimate, lower, upper = (np.exp(part) for part in fit.interval(method, level))
    name = RATIOS[fit.family.link].replace(" ", "_")
    shown = [j for j, one in enumerate(fit.names) if one != INTERCEPT]
    columns = {name: estimate[shown], "lower": lower[shown], "upper": upper[shown]}
    return extra("pandas").DataFrame(columns, index=[fit.names[j] for j in shown])


def margins(fit: TableFit, method: str | None, level: float | None) -> Any:
    """Return average marginal effects; see `TableFit.margins`."""
    found, about = fit.coefficients(method), fit.details
    shown = [j for j, one in enumerate(fit.names) if one != INTERCEPT]
    J = about.jacobian
    effect = about.effect + J @ (found.estimate - fit.coefficients().estimate)
    error = np.sqrt(np.diagonal(J @ found.covariance @ J.T))
    half = found.multiplier(fit.level if level is None else level) * error
    statistic = effect / error
    columns = {
        "effect": effect,
        "std_error": error,
        "statistic": statistic,
        "p_value": found.p_values(statistic),
        "lower": effect - half,
        "upper": effect + half,
    }
    names = [fit.names[j] for j in shown]
    return extra("pandas").DataFrame({k: v[shown] for k, v in columns.items()}, index=names)


def wald_test(
    fit: TableFit,
    hypotheses: Sequence[str | Mapping[str, float]] | str,
    null: Any,
    method: str | None,
    level: float | None,
) -> JointTest:
    """Test several coefficients at once; see `TableFit.test`."""
    listed = [hypotheses] if isinstance(hypotheses, (str, Mapping)) else list(hypotheses)
    contrasts = [line for one in listed for line in _contrasts(fit.names, one)]
    if not contrasts:
        raise refusal("hypotheses", "be a list of at least one name", hypotheses, code="type")
    one = fit.coefficients(method)
    law = student(one.freedom).joint
    given: tuple[Any, Any] = (None, None)
    if one.from_run and one.reading is not None:
        law, given = one.reading.method.law.joint, (one.reading.plan, one.reading.detail)
    if law is None:
        raise refusal(
            "method", "have a law of several coefficients", one.method, code="unsupported"
        )
    estimate, matrix = (np.asarray(part, np.float64) for part in (one.estimate, one.covariance))
    found = joint.Joint(estimate, matrix, one.multiplier, law(*given))
    level = fit.level if level is None else level
    return joint.joint_test(found, np.array(contrasts), null, level)


def _contrasts(names: tuple[str, ...], given: str | Mapping[str, float]) -> list[FloatArray]:
    """Return the rows of R for a coefficient, a term of a formula, or a combination of coefficients."""
    if isinstance(given, Mapping):
        line = np.zeros(len(names))
        for name, factor in given.items():
            line[names.index(checks.choice("hypotheses", name, names))] = checks.number(
                name, factor
            )
        return [line]
    chosen = [j for j, name in enumerate(names) if name == given]
    if not chosen:  # all columns of a factor or a spline
        chosen = [j for j, name in enumerate(names) if name.startswith(f"{given}[")]
    if not chosen:
        terms = dict.fromkeys(name.partition("[")[0] for name in names if "[" in name)
        checks.choice("hypotheses", given, (*names, *terms))
    return [np.eye(len(names))[j] for j in chosen]


class Named(dict[str, Any]):
    """Coefficients by name; a name that is not there is refused with the nearest."""

    def __missing__(self, name: str) -> Any:
        hint = checks.nearest(name, self) or f"; the names: {', '.join(self)}"
        raise refusal("g", "use names of coefficients", name, hint, code="unknown")
