"""The pilot of a run: the minimiser of some rows, coordinates in which their Hessian is I, and a step rule.

The rule takes the largest first step η_1 that keeps three bounds, with E local steps and η_m = η_1 m^(−α):

    stability   η_1 ≤ ½ / λ_max(H_k + C_k/B_k) for every client k, C_k = E f''² ‖a‖² aaᵀ;
    noise       η_1² · 2E · tr(S_k)/B_k ≤ 1 for every client k;
    drift       ½(E − 1) · mean η_m · |Σ_k p_k H_k (ḡ_k − ḡ)| ≤ 0.05 standard errors of the sample,

in whitened coordinates, with batches of B_k rows. E is the largest, 5 at most, for which drift is not what
bounds η_1, or for which the start is forgotten all the same; and smaller with so many columns that there would be
fewer than four rounds per column. As many passes are made as bring the variance of the
run below a share of the sample's.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import numpy as np
import scipy.linalg
from numpy.typing import NDArray

from jaxlsgd.core.checks import Refusal, refusal
from jaxlsgd.core.products import along, gram, times
from jaxlsgd.federation import FederationFit, FinalMessage, final_message
from jaxlsgd.federation.agreement import Stacked, stack
from jaxlsgd.federation.client import Linear, linear
from jaxlsgd.federation.final import minimiser
from jaxlsgd.problems import losses
from jaxlsgd.problems.solution import newton
from jaxlsgd.regression.design import Design
from jaxlsgd.regression.families import Family, family_of
from jaxlsgd.regression.options import Options, check_methods
from jaxlsgd.regression.standardise import Rows

FloatArray = NDArray[np.floating[Any]]
ALPHA = 0.505  # the paper's
LOCAL_STEPS = 5
_PILOT = 20_000  # rows
_DRIFT = 0.05  # of a standard error
_ROUNDS_PER_COLUMN = (
    4  # at least, if E allows: the one-step of 350 coefficients from 540 rounds is far off
)
_FORGOTTEN = 10.0  # Σ γ_m: what is left of the start is e^(−10)
_NEWTON = 60
_FLOOR = 1e-10  # of Ĝ's eigenvalues over the largest
_FLAT = 1e-12  # eigenvalue of the mean Hessian as a matrix of correlations
_EXACT = 1e-12  # variance over what the mean Hessian says, and over the same of the other columns


class Objective(NamedTuple):
    """A family with its numbers, and a ridge on the standardised slopes."""

    family: Family
    tuning: FloatArray
    ridge: FloatArray  # (d,) λ for slopes, 0 for the intercept

    @property
    def numbers(self) -> tuple[float, ...]:
        """The numbers that the loss takes; `tuning` has one that is unused if it takes none."""
        return tuple(self.tuning[: len(losses.NUMBERS.get(self.family.name, ()))].tolist())


def predictors(X: FloatArray, theta: FloatArray, offset: FloatArray | None) -> FloatArray:
    """Return Xθ plus the offset."""
    z = along(X, theta)
    return z if offset is None else z + offset


class Rule(NamedTuple):
    """Steps and length of a run."""

    eta: float  # η_1
    E: int
    passes: int
    bound: str  # which of the three bounds is the smallest


class Whitened:
    """Rows of a pilot, and the coordinates in which their Hessian is I."""

    def __init__(
        self,
        rows: Rows,
        objective: Objective,
        theta: FloatArray,
        names: tuple[str, ...],
        exchanges: int = 0,
    ) -> None:
        self.rows, self.objective, self.theta, self.names = rows, objective, theta, names
        self.exchanges = exchanges  # of d² numbers, that the pilot took
        self.messages = self.messages_at(theta)
        # The messages' mean Hessian, ridge included.
        sent = zip(rows.p.tolist(), self.messages.values(), strict=True)
        self.G = sum((p * one.hessian for p, one in sent), np.diag(objective.ridge))

    @functools.cached_property
    def W(self) -> FloatArray:
        """The matrix of θ = W u."""
        return _whitening(self.G)

    @functools.cached_property
    def start(self) -> FloatArray:
        """The pilot's minimiser, (d,)."""
        return np.linalg.solve(self.W, self.theta)

    @functools.cached_property
    def back(self) -> FloatArray:
        """The matrix from u to coefficients of the table."""
        return self.rows.coordinates.back @ self.W

    @functools.cached_property
    def penalty(self) -> FloatArray:
        """The ridge's Hessian."""
        return self.W.T @ np.diag(self.objective.ridge) @ self.W

    def messages_at(
        self, theta: FloatArray, all_rows: FloatArray | None = None
    ) -> dict[str, FinalMessage]:
        """Return the final message of every client at θ."""
        rows, objective = self.rows, self.objective
        name, numbers, found = objective.family.name, objective.numbers, {}
        ends = np.cumsum(rows.sizes)
        for k, (end, size) in enumerate(zip(ends.tolist(), rows.sizes.tolist(), strict=True)):
            own = slice(end - size, end)
            parts = (rows.X, rows.y, rows.weight, rows.offset)
            mine = tuple(None if one is None else one[own] for one in parts)
            whole = None if all_rows is None else all_rows * (size / rows.p[k])
            found[rows.labels[k]] = final_message(
                name, mine, theta, numbers=numbers, all_rows=whole, least_rows=0
            )
        return found

    def _stacked(self) -> Stacked:
        """The messages at the pilot's minimiser as arrays, ridge included."""
        weights = dict(zip(self.rows.labels, self.rows.p.tolist(), strict=True))
        return stack(self.messages, weights).penalised(self.objective.ridge, self.theta)

    def finish(self, theta: FloatArray, options: Options) -> FederationFit:
        """Return what a server makes of the final messages at θ: the minimiser of the rows, and its covariance."""
        rows = self.rows
        weights = dict(zip(rows.labels, rows.p.tolist(), strict=True))
        at_pilot = theta is self.theta
        messages = self.messages if at_pilot else self.messages_at(theta)
        ridge = self.objective.ridge
        sent = stack(messages, weights).penalised(ridge, theta)
        _check_errors(sent, self.names)
        if options.variance == "HC3":
            messages = self.messages_at(theta, all_rows=sent.G)
        variance = "HC0" if options.variance == "pooled" else options.variance
        return minimiser(
            theta,
            messages,
            clients=options.clients,
            weights=weights,
            variance=variance,
            ridge=ridge,
            labels=self.names,
            level=options.level,
        )

    def derivatives(self, theta: FloatArray) -> Linear:
        """Return all rows with the derivatives of their loss at θ, times weights of mean 1 in each client."""
        rows, objective = self.rows, self.objective
        given = (rows.X, rows.y, rows.weight, rows.offset)
        return linear(objective.family.name, given, theta, objective.numbers)

    def rule(
        self, sizes: NDArray[np.int64], batches: FloatArray, steps: int, options: Options
    ) -> Rule:
        """Return steps and length for clients of these sizes, with these batches in each of the steps."""
        rows = self.rows
        A = times(rows.X, self.W)
        root = self.derivatives(self.theta).second * np.sqrt(np.einsum("ij,ij->i", A, A))
        A *= root[:, None]
        ends = np.cumsum(rows.sizes) - rows.sizes
        fourth = np.stack(
            [gram(A[i : i + n], A[i : i + n]) / n for i, n in zip(ends, rows.sizes, strict=True)]
        )
        chosen = choose_rule(
            self._stacked().turned(self.W),
            fourth,
            sizes=sizes,
            batches=batches,
            back=self.back,
            steps=steps,
            share=1.0 if options.fresh else options.share,
            local_steps=options.local_steps,
        )
        return chosen._replace(passes=1) if options.fresh else chosen

    def coefficients(self, estimate: FloatArray) -> FloatArray:
        """Return an estimate on the scale of the table."""
        return self.rows.coordinates.coefficients(self.W @ estimate)

    def covariance(self, matrix: FloatArray) -> FloatArray:
        """Return a covariance matrix on the scale of the table."""
        return self.back @ matrix @ self.back.T


def start_from(plan: Design, rows: Rows, options: Options) -> Whitened:
    """Minimise over some of the rows; return the whitened coordinates at the minimiser."""
    check_methods(options.methods, len(plan.names))
    ridge = options.ridge * rows.coordinates.slopes
    rng = np.random.default_rng([options.seed, 1])
    size, n = _PILOT if options.methods else len(rows.y), len(rows.y)
    while True:
        chosen = slice(None) if n <= size else np.sort(rng.choice(n, size, replace=False))
        X, y, client = rows.X[chosen], rows.y[chosen], rows.client[chosen]
        weights = (rows.p / np.maximum(np.bincount(client, minlength=len(rows.p)), 1))[client]
        weights = weights if rows.weight is None else weights * rows.weight[chosen]
        offset = None if rows.offset is None else rows.offset[chosen]
        try:
            objective = _tuned(options.family, X, y, weights, ridge, rows, plan.names, offset)
            theta, exchanges = minimise(objective, X, y, weights, plan.names, offset)
            return Whitened(rows, objective, theta, plan.names, exchanges)
        except ValueError:
            # What separates some rows need not separate all.
            if len(y) == n:
                raise
            size *= 4


def _tuned(
    family: Family,
    X: FloatArray,
    y: FloatArray,
    weights: FloatArray,
    ridge: FloatArray,
    rows: Rows,
    names: tuple[str, ...],
    offset: FloatArray | None,
) -> Objective:
    if family.dispersion is not None:
        counts = Objective(family_of("poisson"), np.zeros(1), ridge)
        theta, _ = minimise(counts, X, y, weights, names, offset)
        mean = np.exp(predictors(X, theta, offset))
        return Objective(family, np.asarray(family.dispersion(mean, y, weights)), ridge)
    if family.tune is None:
        return Objective(family, np.zeros(1), ridge)
    root = np.sqrt(weights)
    theta = np.linalg.lstsq(root[:, None] * X, root * y, rcond=None)[0]
    scale = rows.coordinates.y_scale
    found = family.tune(scale * (y - X @ theta), len(rows.y), X.shape[1])
    return Objective(family, np.asarray(found) / family.units(scale), ridge)


class _Point(NamedTuple):
    value: float
    gradient: FloatArray  # (d,)
    rows: Linear


def minimise(
    objective: Objective,
    X: FloatArray,
    y: FloatArray,
    row_weights: FloatArray,
    names: tuple[str, ...],
    offset: FloatArray | None = None,
) -> tuple[FloatArray, int]:
    """Minimise over weighted rows; return θ̂ and how many exchanges of d² numbers it took."""
    family, tuning, ridge = objective

    def at(theta: FloatArray) -> _Point:
        with np.errstate(over="ignore", invalid="ignore"):  # of a step that will be halved
            value = row_weights @ family.loss.value(np, predictors(X, theta, offset), y, tuning)
            rows = linear(family.name, (X, y, row_weights, offset), theta, objective.numbers)
            gradient = rows.score() + ridge * theta
        return _Point(float(value + 0.5 * np.sum(ridge * theta**2)), gradient, rows)

    def step_from(point: _Point) -> FloatArray:
        if not np.isfinite(point.value):
            raise _not_converged(names)
        H = point.rows.hessian() + np.diag(ridge)
        H += 1e-9 * np.trace(H) / len(H) * np.eye(len(H)) + 1e-12 * np.eye(len(H))
        return scipy.linalg.solve(H, point.gradient, assume_a="pos")

    theta, value, count, fall = np.zeros(X.shape[1]), np.inf, 0, np.inf
    points = newton(at, theta, step_from, lambda new, old: new.value <= old.value, halvings=40)
    for theta, point, step in itertools.islice(points, _NEWTON):
        fall = float(point.gradient @ step)
        if abs(value - point.value) < 1e-15 * (1 + abs(value)):
            break
        value, count = point.value, count + 1
        if fall < 1e-12 * (1 + abs(value)):
            theta = theta - step
            break
    _check_separated(objective, X, y, theta, names, offset)
    if not fall < 1e-6 * (1 + abs(value)):
        raise _not_converged(names)
    return theta, count


def _check_errors(sent: Stacked, names: tuple[str, ...]) -> None:
    """Refuse columns along which the loss is flat, and those whose rows are fitted exactly, so that nothing says how sure."""
    root = np.sqrt(np.maximum(np.diagonal(sent.G), 1e-300))
    like = sent.G / np.outer(root, root)
    try:
        np.linalg.cholesky(like - _FLAT * np.eye(len(like)))
    except np.linalg.LinAlgError as error:
        share = np.abs(np.linalg.eigh(like)[1][:, 0])
        involved = [names[j] for j in np.argsort(-share) if share[j] > 0.1 * share.max()][:3]
        hint = "; leave one of them out, or give a ridge"
        rule = "have one minimum: the loss is flat along them"
        raise refusal("columns", rule, " and ".join(involved), hint, code="data") from error
    inverse = np.linalg.inv(sent.G)
    ratio = np.sum((inverse @ sent.noise_uncentred) * inverse, axis=1) / np.diagonal(inverse)
    j = int(np.argmin(ratio))
    if not ratio[j] > _EXACT * ratio.max():
        rule = "be known from rows that differ from their fitted values"
        what = "rows that are fitted exactly, as a level of one row is"
        hint = "; join levels, or leave out its rows"
        raise refusal(f"column {names[j]!r}", rule, what, hint, code="data")


def _not_converged(names: tuple[str, ...]) -> Refusal:
    """Return the error of a minimiser that was not found."""
    what = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    rule = "let Newton's method converge"
    hint = "; is a value an outlier, or a unit far off? Rescale the column, or leave it out"
    return refusal("columns", rule, what, hint, code="data")


def _check_separated(
    objective: Objective,
    X: FloatArray,
    y: FloatArray,
    theta: FloatArray,
    names: tuple[str, ...],
    offset: FloatArray | None,
) -> None:
    """Refuse responses that a combination of columns separates, so that no minimum exists."""
    if not objective.family.separable or objective.ridge.any():
        return
    # Then f'' has vanished in some direction: fitted means run off to an end of their range.
    rows = linear(objective.family.name, (X, y, None, offset), theta, objective.numbers)
    least = 1e-6 * max(np.mean(rows.second), 1e-4)
    if rows.second.min() > least:
        return
    products = gram(X, X) / len(X)
    if scipy.linalg.eigh(rows.hessian(), products, eigvals_only=True)[0] > least:
        return
    # By the size of the coefficients: if f'' has vanished in all rows, all directions look alike.
    share = np.abs(theta) * X.std(axis=0)
    involved = [names[j] for j in np.argsort(-share) if share[j] > 0.1 * share.max()][:3]
    raise refusal(
        "columns",
        "not separate the responses: no finite coefficients are best",
        " and ".join(involved or names[:1]),
        "; leave them out, or give a ridge",
        code="data",
    )


def _whitening(G: FloatArray) -> FloatArray:
    """Return W with WᵀGW = I; directions without curvature are bounded."""
    values, Q = np.linalg.eigh((G + G.T) / 2)
    return Q / np.sqrt(np.maximum(values, _FLOOR * values[-1]))


def choose_rule(
    found: Stacked,
    fourth: FloatArray,
    *,
    sizes: NDArray[np.int64],
    batches: FloatArray,
    back: FloatArray,
    steps: int,
    share: float,
    local_steps: int | None,
) -> Rule:
    """Choose steps and length by the rule at the top of this file.

    Args:
      found: the pilot's messages in whitened coordinates, ridge included.
      fourth: C_k, (K, d, d), in whitened coordinates.
      sizes: (K,) rows of the whole table.
      batches: B_k, (K,) rows per step.
      back: (d, d) whitened coordinates to those of the table.
      steps: per pass.
      share: of the sample's variance that the run's may have.
      local_steps: E; chosen if None.
    """
    p = found.p
    ours = np.tensordot(p**2 / batches / steps, found.covariance, 1)
    sample = np.tensordot(p**2 / sizes, found.covariance, 1)
    ours, sample = (np.sum((back @ each) * back, 1) for each in (ours, sample))
    worst = float(np.max(ours / np.maximum(sample, 1e-300)))
    passes = max(1, int(np.ceil(worst / share)))
    top = max(
        np.linalg.eigvalsh(H + C / B)[-1]
        for H, C, B in zip(found.hessian, fourth, batches, strict=True)
    )
    wander = max(np.trace(S) / B for S, B in zip(found.covariance, batches, strict=True))
    center = found.score - found.mean_score
    pull = np.abs(back @ np.einsum("k,kij,kj->i", p, found.hessian, center))
    drift = float(np.max(pull / np.sqrt(np.maximum(sample, 1e-300))))
    candidates = range(LOCAL_STEPS, 0, -1) if local_steps is None else [local_steps]
    if local_steps is None:
        most = max(1, passes * steps // (_ROUNDS_PER_COLUMN * len(back)))
        candidates = [E for E in candidates if E <= most]
    chosen = None
    for E in candidates:
        rounds = max(1, passes * steps // E)
        slowing = float(np.mean(np.arange(1, rounds + 1.0) ** -ALPHA))
        bounds = {
            "stability": 0.5 / float(top),
            "noise": float(1 / np.sqrt(2 * E * max(wander, 1e-300))),
            "drift": _DRIFT / max(0.5 * (E - 1) * drift * slowing, 1e-300),
        }
        bound = min(bounds, key=lambda name: bounds[name])
        chosen = Rule(bounds[bound], E, passes, bound)
        if bound != "drift" or chosen.eta * slowing * rounds * E >= _FORGOTTEN:
            break
    assert chosen is not None
    return chosen
