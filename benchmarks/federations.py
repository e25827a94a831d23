"""Federations that are not ours: how often intervals from messages cover, and whether clients are found to differ.

Loops: 8 clients of 300 rows each go over their rows again and again, 400 rounds of E = 5 steps, with five
optimisers; intervals are about the population. Sampled clients: 8 to 50 of them, with random intercepts and slopes and a
column that is constant within clients. Agreement: size and power of the test of agreement, beside Cochran's Q on separate
fits, and the interval for a new client. Odd: one client that differs. Levels: a factor of which some clients have one level only.
Shifts: clients whose intercepts differ and whose slopes do not. Tables: messages beside statsmodels on the pooled rows.
Participation: some of the clients take part in each round, with fresh rows; and how many rounds an anchor waits for all.

  python -m benchmarks.federations --out benchmarks/results      400 data sets per loop; about half an hour of one core
  python -m benchmarks.federations --parts sampled odd --out …   these anew, the others as they are stored there
"""

from __future__ import annotations

import csv
import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from scipy import special, stats

from benchmarks import writing
from benchmarks.writing import Row, pipe_table

SEED = 2711
CLIENTS, ROWS, ROUNDS, E, BATCH, DIM = 8, 300, 400, 5, 4, 4
LOOPS = {
    "plain, falling steps": "plain",
    "plain, constant steps": "constant",
    "local momentum 0.9": "momentum",
    "local Adam": "adam",
    "plain, 3 of 8 clients": "some",
}
LEVELS = (0.0, 0.1, 0.2, 0.3, 0.4)
SHIFTS = (0.5, 1.0, 2.0)
PARTS = (
    *("loops", "sampled", "agreement", "odd", "levels", "shifts", "tables"),
    *("participation", "waiting"),
)
# Relative sizes of clients, how many take part, their steps, rounds.
TAKING_PART = {
    "2 of 4, sizes 1:1:1:5": ((1, 1, 1, 5), 2, (16,) * 4, 60),
    "the same, sizes not given": ((1, 1, 1, 5), 2, (16,) * 4, 60),
    "all 4, sizes 1:1:1:5": ((1, 1, 1, 5), 4, (16,) * 4, 40),
    "5 of 20, equal sizes": ((1,) * 20, 5, (16,) * 20, 120),
    "2 of 4, sizes 1:1:1:50": ((1, 1, 1, 50), 2, (16,) * 4, 60),
    "2 of 4, steps 4, 8, 16, 32 or half": ((1, 1, 1, 5), 2, (4, 8, 16, 32), 60),
}


def covered(low: Any, high: Any, truth: Any) -> np.ndarray:
    """Return whether bounds hold the truth, as floats."""
    return ((low <= truth) & (truth <= high)).astype(float)


def share(found: Any) -> tuple[float, float]:
    """Return a mean over runs (rows) and coordinates in per cent, with the standard error between runs."""
    each = np.asarray(found, float)
    each = each.mean(axis=1) if each.ndim > 1 else each
    return 100 * each.mean(), 100 * each.std(ddof=1) / np.sqrt(len(each))


def told(found: Any) -> str:
    """Return `share` as text."""
    return "{:.1f} ({:.1f})".format(*share(found))


# Loops over finite rows.


def make_rows(rng: np.random.Generator, truth: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return rows of all clients, whose covariates are shifted against each other: (K, n, d) and (K, n)."""
    A = rng.standard_normal((CLIENTS, ROWS, DIM)) + 0.3 * np.linspace(-1, 1, CLIENTS)[:, None, None]
    A[..., 0] = 1.0
    y = (rng.uniform(size=A.shape[:2]) < special.expit(A @ truth)).astype(float)
    return A, y


@functools.cache
def loop(kind: str) -> Callable[..., Any]:
    """Return a compiled function (key, A, y) → model, anchored state, state of increments."""
    import jax
    import jax.numpy as jnp

    from jaxlsgd import Anchored, one_step, track
    from jaxlsgd.inference.anchored_rounds import hessian_rounds

    start = jnp.zeros(DIM)
    anchored = track(one_step(), start, rows="reused")
    increments = track(one_step(gradients="increments"), start, rows="reused")
    taking_part = 3 if kind == "some" else CLIENTS
    chosen = jnp.asarray(hessian_rounds(np.full(ROUNDS, E), taking_part, DIM) > 0)

    def gradient(x: Any, A: Any, y: Any) -> Any:
        return (jax.nn.sigmoid(A @ x) - y) @ A / len(y)

    def hessian(x: Any, A: Any) -> Any:
        p = jax.nn.sigmoid(A @ x)
        return (A * (p * (1 - p))[:, None]).T @ A / len(A)

    def client(x: Any, A: Any, y: Any, picked: Any, eta: Any) -> Any:
        def step(carried: Any, index: Any) -> Any:
            x, m, v, l = carried
            g = gradient(x, A[index], y[index])
            if kind == "momentum":
                m = 0.9 * m + g
                return (x - eta * m, m, v, l), None
            if kind == "adam":
                m, v, l = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g**2, l + 1
                move = (m / (1 - 0.9**l)) / (jnp.sqrt(v / (1 - 0.99**l)) + 1e-8)
                return (x - eta * move, m, v, l), None
            return (x - eta * g, m, v, l), None

        zero = jnp.zeros_like(x)
        return jax.lax.scan(step, (x, zero, zero, 0.0), picked)[0][0]

    def one(key: Any, A: Any, y: Any) -> Any:
        def one_round(carried: Any, given: Any) -> Any:
            x, state, plain = carried
            m, due = given
            own, of_clients = jax.random.split(jax.random.fold_in(key, m))
            picked = jax.random.randint(own, (CLIENTS, E, BATCH), 0, ROWS)
            rank = jnp.argsort(jax.random.uniform(of_clients, (CLIENTS,)))
            p = jnp.where(rank < taking_part, 1 / taking_part, 0.0)
            falling = (m + 1.0) ** -0.505
            eta = {
                "plain": falling,
                "some": falling,
                "constant": 0.1,
                "momentum": 0.02,
                "adam": 0.01,
            }[kind]
            each = jax.vmap(client, (None, 0, 0, 0, None))(x, A, y, picked, eta)
            x = p @ each
            now, before = anchored.anchors(state)
            seen = jax.vmap(lambda A, y, i: (A[i.ravel()], y[i.ravel()]))(A, y, picked)
            h = E * (p @ jax.vmap(gradient, (None, 0, 0))(now, *seen))
            H, H_before, H_model = (
                jnp.tensordot(p, jax.vmap(hessian, (None, 0))(at, seen[0]), 1)
                for at in (now, before, x)
            )
            rows = jnp.where(due, taking_part * E * BATCH, 0)
            state = anchored.update(state, x, eta=eta, E=E, anchored=Anchored(h, H, H_before, rows))
            return (x, state, increments.update(plain, x, eta=eta, E=E, hessian=H_model)), None

        carried = (start, anchored.init(start), increments.init(start))
        carried, _ = jax.lax.scan(one_round, carried, (jnp.arange(ROUNDS), chosen))
        x, state, plain = carried
        run, before = (
            tracker.estimator.measure(one.states, None)
            for tracker, one in ((anchored, state), (increments, plain))
        )
        matrix = anchored.estimator.matrix(state.states, None)
        return x, run.estimate, matrix, run.detail.df, before

    return jax.jit(jax.vmap(one))


def loops(replications: int, seed: int) -> list[Row]:
    """Return a row per loop."""
    import jax

    from jaxlsgd import one_step
    from jaxlsgd.federation import final_message, finish

    truth = np.array([-0.3, 0.6, -0.4, 0.2])
    rng = np.random.default_rng(seed)
    A, y = map(np.stack, zip(*(make_rows(rng, truth) for _ in range(replications)), strict=True))
    law, found = one_step(gradients="increments").law, []
    for name, kind in LOOPS.items():
        keys = jax.random.split(jax.random.key(seed), replications)
        run = loop(kind)(keys, A.astype(np.float32), y.astype(np.float32))
        model, x, V, df, before = jax.tree.map(lambda one: np.asarray(one, np.float64), run)
        half = law.multiplier(0.95, None, before.detail) * before.scale
        old = covered(before.estimate - half, before.estimate + half, truth)
        old = np.where(np.isnan(half), 0.0, old)
        q = stats.t.isf(0.025, df)
        own = np.sqrt(np.diagonal(V, axis1=1, axis2=2))
        kept = np.isfinite(own).all(1)
        alone = covered(x - q * own, x + q * own, truth)[kept]
        whole, at_run, of_model, again, rows = [], [], [], 0, []
        for r in range(replications):
            data = {str(k): (A[r, k], y[r, k]) for k in range(CLIENTS)}
            send = lambda at, data=data: {  # noqa: E731
                k: final_message("logistic", own, at) for k, own in data.items()
            }
            first = x[r] if kept[r] else model[r]
            fit = finish(first, send(first))
            whole.append(covered(*fit.interval()[1:], truth))
            if kept[r]:
                total = np.sqrt(own[r] ** 2 + fit.std_error**2)
                at_run.append(covered(x[r] - 1.96 * total, x[r] + 1.96 * total, truth))
            there = finish(model[r], send(model[r]))
            again += there.remainder > 0.5
            for _ in range(3):
                if there.remainder > 0.5:
                    there = finish(there.estimate, send(there.estimate))
            of_model.append(covered(*there.interval()[1:], truth))
            if kept[r]:
                exact = finish(there.estimate, send(there.estimate)).estimate
                rows.append(covered(x[r] - q[r] * own[r], x[r] + q[r] * own[r], exact))
        found.append(
            {
                "loop": name,
                "before": told(old),
                "rounds alone": told(alone),
                "these rows": told(rows),
                "final message": told(whole),
                "at the run's estimate": told(at_run),
                "at the model": told(of_model),
                "asked again": f"{100 * again / replications:.0f}",
                "withheld": f"{100 * (1 - kept.mean()):.1f}",
            }
        )
        print(found[-1], flush=True)
    return found


# Sampled clients.


def sampled_rows(rng: np.random.Generator, family: str, count: int) -> Any:
    """Return clients with random intercepts and slopes: 1, u, and z that is constant within clients."""
    data = {}
    for k in range(count):
        n = int(rng.integers(60, 180))
        A = np.column_stack([np.ones(n), rng.standard_normal(n), np.full(n, rng.standard_normal())])
        x = np.array([0.2, 0.5, -0.3]) + np.array([0.6, 0.4, 0.0]) * rng.standard_normal(3)
        z = A @ x
        if family == "gaussian":
            data[str(k)] = (A, z + rng.standard_normal(n))
        else:
            data[str(k)] = (A, (rng.uniform(size=n) < special.expit(z)).astype(float))
    return data


def to_minimum(family: str, data: Any, **options: Any) -> Any:
    """Send final messages until the last step is short."""
    from jaxlsgd.federation import final_message, finish

    x = np.zeros(next(iter(data.values()))[0].shape[1])
    for _ in range(12):
        sent = {k: final_message(family, own, x, least_rows=0) for k, own in data.items()}
        fit = finish(x, sent, **options)
        if fit.remainder < 1e-3:
            break
        x = fit.estimate
    return fit


def marginal_truth(family: str, seed: int) -> np.ndarray:
    """Return the minimiser over all clients that there might be; of the logistic loss from 40,000 clients."""
    if family == "gaussian":
        return np.array([0.2, 0.5, -0.3])
    rng = np.random.default_rng(seed)
    u, weight = np.polynomial.hermite_e.hermegauss(24)
    weight = weight / weight.sum()
    count = 40_000
    z = rng.standard_normal(count)
    effects = np.array([0.2, 0.5]) + np.array([0.6, 0.4]) * rng.standard_normal((count, 2))
    eta = effects[:, :1] + effects[:, 1:] * u + (-0.3 * z)[:, None]
    A = np.stack(np.broadcast_arrays(np.ones_like(eta), u[None, :], z[:, None]), -1).reshape(-1, 3)
    w, y = np.broadcast_to(weight, eta.shape).ravel() / count, special.expit(eta).ravel()
    x = np.zeros(3)
    for _ in range(12):
        p = special.expit(A @ x)
        x = x - np.linalg.solve((A * (w * p * (1 - p))[:, None]).T @ A, (w * (p - y)) @ A)
    return x


def sampled(replications: int, seed: int) -> list[Row]:
    """Return a row per family and way of reading."""
    import statsmodels.api as sm

    from jaxlsgd.federation import finish

    found = []
    for count, family in itertools.product((8, 20, 50), ("gaussian", "logistic")):
        truth = marginal_truth(family, seed)
        rng = np.random.default_rng([seed, count])
        hits: dict[str, list[np.ndarray]] = {"given": [], "sampled": [], "statsmodels": []}
        for _ in range(replications):
            data = sampled_rows(rng, family, count)
            here = to_minimum(family, data)
            for how in ("given", "sampled"):
                fit = finish(here.estimate, here.messages, clients=how)
                hits[how].append(covered(*fit.interval()[1:], truth))
            A, y = (np.concatenate([own[i] for own in data.values()]) for i in range(2))
            groups = np.repeat(np.arange(count), [len(own[1]) for own in data.values()])
            kind = sm.families.Gaussian() if family == "gaussian" else sm.families.Binomial()
            fit = sm.GLM(y, A, family=kind).fit(cov_type="cluster", cov_kwds={"groups": groups})
            half = stats.t.isf(0.025, count - 1) * fit.bse
            hits["statsmodels"].append(covered(fit.params - half, fit.params + half, truth))
        for how, each in hits.items():
            columns = np.array(each)
            names = ("intercept", "slope", "constant within clients")
            row = {"family": family, "clients": how, "how many": count}
            row |= {name: told(columns[:, j]) for j, name in enumerate(names)}
            found.append(row)
            print(row, flush=True)
    return found


# Heterogeneity.


def separate_fits(data: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return own estimates and Hessians n_k H_k of clients whose separate fit exists."""
    own, curvature = [], []
    for A, y in data.values():
        x = np.zeros(A.shape[1])
        try:
            for _ in range(25):
                p = special.expit(A @ x)
                H = (A * (p * (1 - p))[:, None]).T @ A
                step = np.linalg.solve(H, (p - y) @ A)
                x = x - step
                if np.max(np.abs(step)) < 1e-8:
                    break
        except np.linalg.LinAlgError:
            continue
        if np.max(np.abs(step)) < 1e-6 and np.max(np.abs(x)) < 15:
            own.append(x)
            curvature.append(H)
    return np.array(own), np.array(curvature)


def cochran(data: Any) -> tuple[float, int]:
    """Return the p-value of the multivariate Q on separate fits, and how many clients have none."""
    own, W = separate_fits(data)
    if len(own) < 2:
        return 1.0, len(data) - len(own)
    mean = np.linalg.solve(W.sum(0), np.einsum("kij,kj->i", W, own))
    off = own - mean
    Q = np.einsum("ki,kij,kj->", off, W, off)
    return float(stats.chi2.sf(Q, (len(own) - 1) * own.shape[1])), len(data) - len(own)


FEDERATIONS = {
    "8 clients of 300 rows": (8, 300, 300),
    "20 clients of 20 to 200": (20, 20, 200),
    "50 clients of 30": (50, 30, 30),
}


COEFFICIENTS = np.array([-0.3, 0.6, -0.4])


def clients_around(
    rng: np.random.Generator, count: int, least: int, most: int, tau: float, odd: float = 0.0
) -> Any:
    """Return clients with coefficients of standard deviation tau; the first has a slope that is larger by `odd`."""
    data = {}
    for k in range(count):
        n = int(rng.integers(least, most + 1))
        A = rng.standard_normal((n, 3)) + 0.3 * np.sin(k)
        A[:, 0] = 1.0
        x = COEFFICIENTS + tau * rng.standard_normal(3) + (k == 0) * np.array([0.0, odd, 0.0])
        data[str(k)] = (A, (rng.uniform(size=n) < special.expit(A @ x)).astype(float))
    return data


def odd(replications: int, seed: int) -> list[Row]:
    """Return a row per federation and shift of the one client that differs."""
    found = []
    for (name, (count, least, most)), shift in itertools.product(FEDERATIONS.items(), SHIFTS):
        rng = np.random.default_rng([seed, count, int(10 * shift), 1])
        it, others = [], []
        for _ in range(replications):
            data = clients_around(rng, count, least, most, 0.0, shift)
            who = set(to_minimum("logistic", data).agreement().stands_out)
            it.append("0" in who)
            others.append(bool(who - {"0"}))
        row = {"federation": name, "slope larger by": shift, "runs": replications}
        row |= {"it stands out": told(it), "another does": told(others)}
        found.append(row)
        print(row, flush=True)
    return found


def heterogeneity(replications: int, seed: int) -> list[Row]:
    """Return a row per federation and standard deviation between clients."""
    found = []
    for name, (count, least, most) in FEDERATIONS.items():
        for tau in LEVELS:
            rng = np.random.default_rng([seed, count, int(100 * tau)])
            runs = replications if tau == 0 else replications // 4
            ours, each, rival, lost, new, out = [], [], [], [], [], []
            for _ in range(runs):
                data = clients_around(rng, count, least, most, tau)
                found_here = to_minimum("logistic", data).agreement()
                ours.append(found_here.p_value < 0.05)
                each.append(found_here.p_values < 0.05)
                another = COEFFICIENTS + tau * rng.standard_normal(3)
                new.append(covered(*found_here.new_client, another))
                out.append(bool(found_here.stands_out))
                p, missing = cochran(data)
                rival.append(p < 0.05)
                lost.append(missing / count)
            row = {
                "federation": name,
                "between clients": tau,
                "runs": runs,
                "messages": told(ours),
                "per coefficient": told(each),
                "one stands out": told(out),
                "new client covered": told(new),
                "Cochran's Q": told(rival),
                "clients without a fit": f"{100 * np.mean(lost):.1f}",
            }
            found.append(row)
            print(row, flush=True)
    return found


# Clients that identify some coefficients only, and clients that differ in some only. Many federations at a time, in NumPy.

AT_ONCE = 50
Design = Callable[
    [np.random.Generator, np.ndarray], np.ndarray
]  # (rng, sizes (R, K)) → (R, K, n, 3)


def agreements(
    rng: np.random.Generator, family: str, sizes: np.ndarray, design: Design, tau: np.ndarray
) -> Any:
    """Yield the agreement of each federation, its messages at the minimiser of its rows."""
    from jaxlsgd.federation import FinalMessage, agree

    for start in range(0, len(sizes), AT_ONCE):
        n = sizes[start : start + AT_ONCE]
        A = design(rng, n)
        A *= (np.arange(A.shape[2]) < n[..., None])[..., None]
        own = COEFFICIENTS + tau * rng.standard_normal((*n.shape, 3))
        z = np.einsum("rkni,rki->rkn", A, own)
        noise = rng.standard_normal(z.shape)
        y = z + noise if family == "gaussian" else (noise < z_of(z)).astype(float)
        x = np.tile(COEFFICIENTS, (len(n), 1))
        for _ in range(6):
            z = np.einsum("rkni,ri->rkn", A, x)
            mean = z if family == "gaussian" else special.expit(z)
            scores = (mean - y)[..., None] * A
            bend = np.ones_like(z) if family == "gaussian" else mean * (1 - mean)
            H = np.einsum("rkni,rkn,rknj->rkij", A, bend, A, optimize=True)
            s = scores.sum(2)
            x = x - np.linalg.solve(H.sum(1), s.sum(1)[..., None])[..., 0]
        outer = np.einsum("rkni,rknj->rkij", scores, scores, optimize=True)
        m = n[..., None, None]
        S = (outer - s[..., None] * s[..., None, :] / m) / (m - 1)
        for r, x_of_all in enumerate(x):
            parts = zip(n[r].tolist(), s[r] / n[r][:, None], S[r], H[r] / m[r], strict=True)
            sent = {str(k): FinalMessage(*one, answers=0) for k, one in enumerate(parts)}
            yield agree(sent, estimate=x_of_all)


def z_of(z: np.ndarray) -> np.ndarray:
    """Return the normal quantile of a logistic probability, below which a normal number means 1."""
    return special.ndtri(special.expit(z))


def some_with_one_level(others: int) -> Design:
    """Return the design 1, u and a factor; the first 5 clients have one level, or `others` rows of the other."""

    def design(rng: np.random.Generator, n: np.ndarray) -> np.ndarray:
        shape = (*n.shape, int(n.max()))
        factor = (rng.uniform(size=shape) < 0.4).astype(float)
        factor[:, :5] = np.arange(5)[:, None] % 2
        factor[:, :5, :others] = 1 - np.arange(5)[:, None] % 2
        return np.stack([np.ones(shape), rng.standard_normal(shape), factor], -1)

    return design


def shifted_columns(rng: np.random.Generator, n: np.ndarray) -> np.ndarray:
    """Return the design of `clients_around`."""
    A = rng.standard_normal((*n.shape, int(n.max()), 3))
    A += 0.3 * np.sin(np.arange(n.shape[1]))[:, None, None]
    A[..., 0] = 1.0
    return A


def levels(replications: int, seed: int) -> list[Row]:
    """Return a row per family, spread of the factor's coefficient, and rows of the other level in 5 of 20 clients."""
    found = []
    cells = [(0, 0.0), (1, 0.0), (3, 0.0), (0, 0.5)]
    for family, (others, tau) in itertools.product(("gaussian", "logistic"), cells):
        rng = np.random.default_rng([seed, others, int(10 * tau), len(family)])
        runs = replications if tau == 0 else replications // 4
        rejected, spreads, new, longest = [], [], [], []
        design, sizes = some_with_one_level(others), rng.integers(60, 181, (runs, 20))
        spread = np.array([0.0, 0.0, tau])
        for here in agreements(rng, family, sizes, design, spread):
            rejected.append([here.p_value < 0.05, *(here.p_values < 0.05)])
            spreads.append(np.sqrt(here.tau2[2]))
            low, high = (float(bound[2]) for bound in here.new_client)
            new.append(covered(low, high, COEFFICIENTS[2] + tau * rng.standard_normal()))
            longest.append(high - low)
        row = {"family": family, "rows of the other level": others, "between clients": tau}
        titles = ("overall", "intercept", "slope", "factor")
        row |= {"runs": runs}
        row |= {t: told(c) for t, c in zip(titles, np.array(rejected).T, strict=True)}
        row |= {"median τ̂": f"{np.median(spreads):.2f}", "new client covered": told(new)}
        row["longest new-client interval"] = f"{np.max(longest):.2f}"
        found.append(row)
        print(row, flush=True)
    return found


def shifts(replications: int, seed: int) -> list[Row]:
    """Return a row per family, federation and standard deviation of intercepts, with slopes alike."""
    found = []
    sets = itertools.product(("gaussian", "logistic"), FEDERATIONS.items(), (0.3, 0.5, 1.0))
    for family, (name, (count, least, most)), tau in sets:
        rng = np.random.default_rng([seed, count, int(10 * tau), len(family), 2])
        sizes = rng.integers(least, most + 1, (replications, count))
        spread = np.array([tau, 0.0, 0.0])
        made = agreements(rng, family, sizes, shifted_columns, spread)
        rejected = np.array([here.p_values < 0.05 for here in made])
        row = {"family": family, "federation": name, "between intercepts": tau}
        row["runs"] = replications
        titles = ("intercept", "slope 0.6", "slope -0.4")
        row |= {t: told(c) for t, c in zip(titles, rejected.T, strict=True)}
        row["both slopes"] = told(rejected[:, 1:])
        found.append(row)
        print(row, flush=True)
    return found


# Some clients at a time.


def participation(replications: int, seed: int) -> list[Row]:
    """Return a row per federation of linear clients; the first has the most runs."""
    return [
        taking_part(name, replications // (4 if i else 1), seed)
        for i, name in enumerate(TAKING_PART)
    ]


def taking_part(name: str, runs: int, seed: int) -> Row:
    """Return the row of one federation, whose clients differ in minima and covariates."""
    from jaxlsgd.core.checks import Refusal
    from jaxlsgd.federation import finish

    sizes, many, steps, rounds = TAKING_PART[name]
    p, place = np.array(sizes) / sum(sizes), np.linspace(0, 1, len(sizes))
    minima = np.stack([place**2, 0.5 - place], 1)
    spread = 1 + 0.5 * place  # standard deviation of covariates
    truth = (p * spread**2) @ minima / (p @ spread**2)
    weights = None if "not given" in name else dict(zip(map(str, range(len(p))), p, strict=True))
    hits, errors, off, lost = [], [], [], 0
    for r in range(runs):
        rng = np.random.default_rng([seed, list(TAKING_PART).index(name), r])
        state = linear_rounds(rng, weights, sizes, minima, spread, many, steps, rounds)
        try:
            fit = finish(state, None)
        except Refusal:
            lost += 1
            continue
        hits.append(covered(*fit.interval()[1:], truth))
        off.append(fit.estimate - truth)
        errors.append(fit.std_error)
    sd, mean = np.std(off, 0), lambda each: np.mean(each, 0)
    row = {"federation": name, "rounds": rounds, "runs": runs, "covered": told(hits)}
    row |= {f"covered, {j + 1}": told(np.array(hits)[:, j]) for j in range(2)}
    row |= {
        "bias, in sd": ", ".join(f"{b:.2f}" for b in mean(off) / sd),
        "standard error over sd": ", ".join(f"{b:.2f}" for b in mean(errors) / sd),
        "no interval": f"{100 * lost / runs:.1f}",
    }
    print(row, flush=True)
    return row


def linear_rounds(
    rng: np.random.Generator,
    weights: dict[str, float] | None,
    sizes: Any,
    minima: np.ndarray,
    spread: np.ndarray,
    many: int,
    steps: Any,
    rounds: int,
) -> Any:
    """Return a server's state after rounds of `many` clients each, one row per step."""
    from jaxlsgd.federation import begin, broadcast, receive, round_message

    state = begin(np.zeros(2), rows="fresh", weights=weights)
    for _ in range(rounds):
        sent, messages = broadcast(state), {}
        for k in np.sort(rng.choice(len(sizes), many, replace=False)).tolist():
            E = steps[k] if len(set(steps)) == 1 or rng.random() < 0.5 else steps[k] // 2
            A = spread[k] * rng.standard_normal((E, 2))
            y = A @ minima[k] + rng.standard_normal(E)
            x = state.params - 0.3 * (A @ state.params - y) @ A / E
            messages[str(k)] = round_message(
                "gaussian",
                (A, y),
                sent.anchors,
                round=sent.round,
                steps=E,
                examples=100 * sizes[k],
                params=x,
                hessians=sent.asks(str(k)),
                least_rows=0,
            )
        state = receive(state, messages, eta=0.3)
    return state


def waiting(replications: int, seed: int) -> list[Row]:
    """Return how many rounds an anchor waits until each client has reported twice, by drawing participants alone."""
    found = []
    for many, count in ((2, 4), (5, 20), (10, 100), (10, 1000), (100, 1000)):
        rng = np.random.default_rng([seed, many, count])
        rounds = []
        for _ in range(replications):
            left, m = np.full(count, 2), 0
            while left.max() > 0:
                left[rng.choice(count, many, replace=False)] -= 1
                m += 1
            rounds.append(m)
        low, middle, high = np.quantile(rounds, (0.05, 0.5, 0.95))
        row = {"taking part": f"{many} of {count:,}", "runs": replications}
        row |= {"rounds, median": f"{middle:.0f}", "5 to 95 %": f"{low:.0f} to {high:.0f}"}
        found.append(row)
        print(row, flush=True)
    return found


# Real tables.


def real_tables() -> list[tuple[str, str, np.ndarray, np.ndarray]]:
    """Return name, family, columns and response of tables that come with statsmodels."""
    from statsmodels import datasets

    def table(name: str, family: str, response: Any, columns: list[str]) -> Any:
        data = getattr(datasets, name).load_pandas().data.dropna(subset=columns)
        y = np.asarray(response(data), float)
        A = np.column_stack([np.ones(len(data)), np.asarray(data[columns], float)])
        return name, family, A, y

    return [
        table("fair", "logistic", lambda t: t["affairs"] > 0, ["rate_marriage", "age", "educ"]),
        table("anes96", "logistic", lambda t: t["vote"], ["age", "educ", "income", "selfLR"]),
        table("spector", "logistic", lambda t: t["GRADE"], ["GPA", "TUCE", "PSI"]),
        table("randhie", "poisson", lambda t: t["mdvis"], ["lncoins", "lpi", "physlm", "disea"]),
        table("statecrime", "gaussian", lambda t: t["murder"], ["urban", "poverty", "hs_grad"]),
    ]


def real(seed: int) -> list[Row]:
    """Return a row per table."""
    import statsmodels.api as sm

    kinds = {
        "gaussian": sm.families.Gaussian,
        "logistic": sm.families.Binomial,
        "poisson": sm.families.Poisson,
    }
    found = []
    for name, family, A, y in real_tables():
        right = sm.GLM(y, A, family=kinds[family]()).fit(cov_type="HC0")
        rng = np.random.default_rng(seed)
        count = 3 if len(y) < 100 else 8
        client = rng.integers(0, count, len(y))
        data = {str(k): (A[client == k], y[client == k]) for k in range(count)}
        fit = to_minimum(family, data)
        gap = np.max(np.abs(fit.estimate - right.params) / right.bse)
        longer = np.max(np.abs(fit.std_error / right.bse - 1))
        row = {"table": name, "family": family, "rows": len(y), "clients": count}
        row |= {"estimate": f"{gap:.1e}", "standard error": f"{longer:.3f}"}
        found.append(row)
        print(row, flush=True)
    return found


def as_table(rows: list[Row], left: int = 1) -> list[str]:
    """Return rows as a Markdown table."""
    lines = [list(row.values()) for row in rows]
    return pipe_table(list(rows[0]), lines, left=range(left))


def main() -> None:
    """Run all parts and write the tables."""
    options = writing.parser("federations", __doc__, 400, SEED)
    options.add_argument("--agreement-runs", type=int, default=1000, help="without heterogeneity")
    options.add_argument("--sampled-runs", type=int, default=1000)
    options.add_argument("--participation-runs", type=int, default=2000)
    options.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    arguments = options.parse_args()
    many, seed, few = arguments.replications, arguments.seed, arguments.agreement_runs
    make: dict[str, Callable[[], list[Row]]] = {
        "tables": lambda: real(seed),
        "sampled": lambda: sampled(arguments.sampled_runs, seed),
        "agreement": lambda: heterogeneity(few, seed),
        "odd": lambda: odd(max(few // 4, 2), seed),
        "levels": lambda: levels(2 * few, seed),
        "shifts": lambda: shifts(2 * few, seed),
        "loops": lambda: loops(many, seed),
        "participation": lambda: participation(arguments.participation_runs, seed),
        "waiting": lambda: waiting(many, seed),
    }
    stored = arguments.out / "federations.csv"
    found, seeds = stored_rows(stored) if set(arguments.parts) < set(PARTS) else ({}, {})
    for part, rows in make.items():
        if part in arguments.parts:
            found[part], seeds[part] = rows(), seed
            write(arguments.out, found, seeds)


def stored_rows(path: Path) -> tuple[dict[str, list[Row]], dict[str, int]]:
    """Return the rows of all parts that a file has, and their seeds."""
    found: dict[str, dict[str, Row]] = {}
    seeds: dict[str, int] = {}
    for line in csv.DictReader(path.read_text(encoding="utf-8").splitlines()):
        row = found.setdefault(line["part"], {}).setdefault(line["row"], {})
        row[line["column"]] = line["value"].removeprefix("'")  # put there against formulas
        seeds[line["part"]] = int(line["seed"])
    return {part: list(rows.values()) for part, rows in found.items()}, seeds


def write(out: Path, found: dict[str, list[Row]], seeds: dict[str, int]) -> None:
    """Write the tables as Markdown and CSV."""
    made = ", ".join(f"{part} {seeds[part]}" for part in PARTS if part in found)
    shown = {
        part: as_table(found[part], 1 + (part in ("sampled", "shifts", "tables"))) for part in found
    }
    text = [
        "# Federations that are not ours",
        "",
        f"Made by `python -m benchmarks.federations`, with seeds: {made}. Shares in per cent, with Monte-Carlo "
        "standard errors in brackets.",
        "",
        "## Loops over the same rows",
        "",
        f"{CLIENTS} clients of {ROWS} rows, logistic, d = {DIM}, {ROUNDS} rounds of E = {E} steps with batches of {BATCH} drawn "
        "from the client's own rows, 400 data sets: coverage of 95 % intervals, mean over coefficients, for the population "
        'unless it says "these rows". Before: one_step from increments, read as if rows were fresh. Rounds alone: gradients at '
        "anchors, read likewise (refused now). Final message: `finish` at the estimate of the rounds. At the run's estimate: "
        "its own variance and that of the final message together (`correct=False`). At the model: `finish` with the trained model "
        "and no message during training; asked again: how often a second final message was asked for.",
        "",
        *shown.get("loops", ()),
        "",
        "## Some clients at a time",
        "",
        "Linear clients with minima and covariates of their own, fresh rows, one per step; 95 % intervals of the rounds alone, for "
        "the minimiser of the mean of all clients by size. Covered: mean over the two coefficients, and each.",
        "",
        *shown.get("participation", ()),
        "",
        "Rounds until each client has reported twice, which an anchor waits for; by drawing who takes part, alone. An interval "
        "needs one such anchor at least, usually two.",
        "",
        *shown.get("waiting", ()),
        "",
        "## Sampled clients",
        "",
        "Clients of 60 to 180 rows with random intercepts (standard deviation 0.6) and slopes (0.4): coverage of the mean "
        "over all clients. Sampled: by leaving out one client after the other (CR3), with t(K − 1). statsmodels: cluster-robust "
        "on the pooled rows (CR1), with t(K − 1).",
        "",
        *shown.get("sampled", ()),
        "",
        "## Do the clients agree?",
        "",
        "Logistic, d = 3, coefficients of clients with a standard deviation between them: how often a test at 5 % rejects. "
        "One stands out: at least one client does, at 5 % in all comparisons together. New client covered: the 95 % interval "
        "for the coefficients of a client that is not among these. Cochran's Q: on separate fits, without the clients that "
        "have none.",
        "",
        *shown.get("agreement", ()),
        "",
        "One client has a larger slope, the others are alike: how often it is among those that stand out at 5 % in all "
        "comparisons together, and how often another is.",
        "",
        *shown.get("odd", ()),
        "",
        "### Clients with one level of a factor",
        "",
        "20 clients of 60 to 180 rows; 5 of them have one level of a factor, or so many rows of the other. Slopes and intercepts "
        "are alike, and coefficients of the factor have a standard deviation between clients: how often tests at 5 % reject.",
        "",
        *shown.get("levels", ()),
        "",
        "### Intercepts that differ",
        "",
        "As above, and only intercepts differ: how often tests at 5 % reject, per coefficient. Gaussian rows have noise "
        "of variance 1. One Newton step from the common minimiser is exact there. For the logistic loss it takes a part of large "
        "differences between intercepts for differences between slopes.",
        "",
        *shown.get("shifts", ()),
        "",
        "## Real tables",
        "",
        "Rows dealt to clients at random; the largest difference from statsmodels' GLM on the pooled rows (HC0), of estimates "
        "in standard errors, and of standard errors as a share.",
        "",
        *shown.get("tables", ()),
        "",
    ]
    (out / "federations.md").write_text("\n".join(text), encoding="utf-8")
    keyed = [{"part": part, "row": row} for part in PARTS for row in found.get(part, ())]
    long = [
        {"part": one["part"], "seed": seeds[one["part"]], "row": i, "column": key, "value": value}
        for i, one in enumerate(keyed)
        for key, value in one["row"].items()
    ]
    writing.write_csv(out / "federations.csv", long)


if __name__ == "__main__":
    main()
