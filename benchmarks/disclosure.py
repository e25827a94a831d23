"""Which rows can be computed from the sums that one client sends: `python -m benchmarks.disclosure --out DIR`.

Clients of a logistic regression with an intercept and independent normal columns. The attacker knows the model, the parameters
at which sums were made, how many rows there are, and how many of the outcomes are 1. It looks for rows that
have the same sums: Levenberg and Marquardt's least squares from many random starts, in float64, of which it takes the best.
A client is lost if all of its rows are within 0.01 standard deviations of rows of that solution.

Four kinds of messages: a final one; the Hessians of one round at two anchors, with its sum of gradients; the same of ten rounds
over the same rows, as a client with full batches sends them; and a final one if the attacker knows the outcomes and all columns but
one. Beside them, one division and no search: a row that alone has its level of a factor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import linear_sum_assignment

from benchmarks.writing import Row, parser, percent, pipe_table, write_csv
from jaxlsgd.federation import final_message

CLOSE = 0.01  # standard deviations of a column
STEPS, CLIENTS, STARTS = 400, 20, 32
KINDS = {
    "final": "A final message",
    "round": "One round with Hessians",
    "rounds": "Ten rounds with Hessians of the same rows",
    "column": "A final message, and all columns but one are known",
}
SIZES = {3: (4, 5, 6, 7, 8, 9, 10, 12, 15, 20), 5: (6, 7, 8, 9, 10, 12, 15, 20, 25)}
SIZES_OF_ROUNDS = {3: SIZES[3], 5: (6, 7, 8, 9, 10, 12)}
SIZES_OF_COLUMN = {3: (6, 9, 12, 15, 20, 30), 5: (10, 15, 20, 25, 30, 35, 50)}
ALONE = (20, 100, 1000)
Sums = Callable[[Any, Any, Any], Any]


def _upper(matrix: Any) -> Any:
    return matrix[jnp.triu_indices(len(matrix))]


def _final(A: Any, y: Any, places: Any) -> Any:
    """Return what `final_message` sends, symmetric parts once."""
    p = jax.nn.sigmoid(A @ places[0])
    scores = (p - y)[:, None] * A
    off = scores - scores.mean(0)
    hessian = (A * (p * (1 - p))[:, None]).T @ A / len(A)
    return jnp.concatenate([scores.mean(0), _upper(off.T @ off / (len(A) - 1)), _upper(hessian)])


def _rounds(A: Any, y: Any, places: Any) -> Any:
    """Return what `round_message` sends with Hessians in rounds over these rows: at each place after the first."""

    def at(x: Any) -> Any:
        p = jax.nn.sigmoid(A @ x)
        return (p - y) @ A / len(A), _upper((A * (p * (1 - p))[:, None]).T @ A / len(A))

    scores, hessians = jax.vmap(at)(places)
    return jnp.concatenate([scores[1:].ravel(), hessians.ravel()])


@functools.partial(jax.jit, static_argnums=(0, 1))
def search(sums: Sums, fixed: int, A: Any, y: Any, places: Any, start: Any) -> Any:
    """Return the unknown columns of A, and the sum of squared differences; the first `fixed` columns are known."""
    shape, known = A[:, fixed:].shape, A[:, :fixed]
    target = sums(A, y, places)

    def off(u: Any) -> Any:
        return sums(jnp.concatenate([known, u.reshape(shape)], 1), y, places) - target

    def step(carried: Any, _: Any) -> Any:
        u, cost, damping = carried
        J, r = jax.jacfwd(off)(u), off(u)
        inner = J.T @ J
        inner = inner + damping * jnp.diag(jnp.diagonal(inner) + 1e-9)
        move = jax.scipy.linalg.cho_solve(jax.scipy.linalg.cho_factor(inner), J.T @ r)
        size = jnp.linalg.norm(move) / jnp.sqrt(len(u))
        new = u - move / jnp.maximum(size, 1.0)
        after = jnp.sum(off(new) ** 2)
        better = after < cost
        damping = jnp.where(
            better, jnp.maximum(0.3 * damping, 1e-14), jnp.minimum(5 * damping, 1e6)
        )
        return (jnp.where(better, new, u), jnp.where(better, after, cost), damping), None

    carried = (start, jnp.sum(off(start) ** 2), 1e-2)
    (u, cost, _), _ = jax.lax.scan(step, carried, None, length=STEPS)
    return u.reshape(shape), cost


def distances(right: np.ndarray, y: np.ndarray, guess: np.ndarray) -> np.ndarray:
    """Return how far each row is from its own row of a solution, matched as well as can be: the largest column."""
    gap = np.abs(right[:, None] - guess[None]).max(-1) + 1e3 * (y[:, None] != y[None])
    i, j = linear_sum_assignment(np.minimum(gap, 10.0))
    return gap[i, j]


def cell(kind: str, d: int, n: int, clients: int, starts: int, seed: int) -> Row:
    """Attack clients of one size."""
    rng = np.random.default_rng([seed, d, n, list(KINDS).index(kind)])
    truth = np.r_[-0.3, np.tile([0.6, -0.4], d)][:d]
    fixed = d - 1 if kind == "column" else 1
    sums = _rounds if kind.startswith("round") else _final
    many = {"final": 1, "column": 1, "round": 2, "rounds": 11}[kind]
    lost, rows, chance, best = [], [], [], []
    for _ in range(clients):
        A = rng.standard_normal((n, d))
        A[:, 0] = 1.0
        y = (rng.uniform(size=n) < 1 / (1 + np.exp(-A @ truth))).astype(float)
        # Anchors come near to the minimiser as rounds go on; those of one round are one of these steps apart.
        away = 0.7 ** np.arange(1, many + 1)[::-1][:, None] * rng.standard_normal((many, d))
        places = truth + (away if many > 1 else 0.1 * rng.standard_normal((1, d)))
        begin = rng.standard_normal((starts, n * (d - fixed)))
        with jax.enable_x64(True):
            found = jax.vmap(functools.partial(search, sums, fixed), (None, None, None, 0))(
                *map(jnp.asarray, (A, y, places, begin))
            )
        guess, cost = (np.asarray(one) for one in found)
        right = A[:, fixed:]
        # Known columns tell rows apart, so that no matching is needed.
        chosen = guess[np.nanargmin(cost)]
        gap = np.abs(right - chosen).max(-1) if kind == "column" else distances(right, y, chosen)
        other = begin[0].reshape(right.shape)
        blind = np.abs(right - other).max(-1) if kind == "column" else distances(right, y, other)
        lost.append(np.all(gap < CLOSE))
        rows.append(np.mean(gap < 0.1))
        chance.append(np.mean(blind < 0.1))
        best.append(np.nanmin(cost))
    unknown = n * (d - fixed)
    equations = {"final": d * d + 2 * d, "column": d * d + 2 * d, "round": d * d + 2 * d}
    return {
        "kind": kind,
        "d": d,
        "rows": n,
        "rows/d": f"{n / d:.1f}",
        "unknowns": unknown,
        "equations": equations.get(kind, 10 * d + 11 * d * (d + 1) // 2),
        "clients": clients,
        "starts": starts,
        "all rows computed": np.mean(lost),
        "rows within 0.1": np.mean(rows),
        "by chance": np.mean(chance),
        "solutions found": np.mean(np.array(best) < 1e-16),
    }


def alone(n: int, clients: int, seed: int) -> float:
    """Return how often the one row with its level, its outcome included, is known from a final message of n rows."""
    rng, computed = np.random.default_rng([seed, n]), []
    for _ in range(clients):
        A = rng.standard_normal((n, 4))
        A[:, 0], A[:, 3] = 1.0, 0.0
        A[0, 3] = 1.0
        x = np.array([-0.3, 0.6, -0.4, 0.2])
        y = (rng.uniform(size=n) < 1 / (1 + np.exp(-A @ x))).astype(float)
        sent = final_message("logistic", (A, y), x)
        row = sent.hessian[3] / sent.hessian[3, 0]
        outcome = float(sent.score[3] < 0)
        computed.append(np.max(np.abs(row - A[0])) < CLOSE and outcome == y[0])
    return float(np.mean(computed))


def main() -> None:
    """Attack clients of all kinds and sizes, and write the tables."""
    options = parser("disclosure", __doc__, CLIENTS, 3411)
    options.add_argument("--starts", type=int, default=STARTS)
    arguments = options.parse_args()
    found: list[Row] = []
    for kind in KINDS:
        for d, sizes in {"column": SIZES_OF_COLUMN, "rounds": SIZES_OF_ROUNDS}.get(
            kind, SIZES
        ).items():
            for n in sizes:
                one = cell(kind, d, n, arguments.replications, arguments.starts, arguments.seed)
                found.append(one)
                print(one, flush=True)
    single = [(n, alone(n, arguments.replications, arguments.seed)) for n in ALONE]
    write_csv(arguments.out / "disclosure.csv", found)
    write(arguments, found, single)


def write(arguments: Any, found: list[Row], single: list[tuple[int, float]]) -> None:
    """Write the tables as Markdown."""
    text = [
        "# What the sums of a small client give away",
        "",
        "Made by `python -m benchmarks.disclosure`. Logistic, an intercept and d − 1 independent normal columns. The attacker knows the model, "
        "where the sums were made, the number of rows, and the number of outcomes that are 1. It looks for rows with these sums "
        f"from {arguments.starts} random starts and takes the best. {arguments.replications} clients per line. Computed: the share of clients of which "
        f"all rows are found to {CLOSE:g} standard deviations. Rows within 0.1: of single rows, all columns to "
        "0.1 standard deviations; by chance: the same of random rows. Solutions found: how often the search ended at rows "
        "with just these sums, which are others if there are fewer equations than unknowns. Where it is below 100 %, a longer "
        "search may compute more.",
    ]
    columns = ["all rows computed", "rows within 0.1", "by chance", "solutions found"]
    for kind, title in KINDS.items():
        own = [one for one in found if one["kind"] == kind]
        plain = ["d", "rows", "rows/d", "unknowns", "equations"]
        lines = [[*(one[c] for c in plain), *(percent(one[c]) for c in columns)] for one in own]
        header = [*plain, "computed, %", *(f"{c}, %" for c in columns[1:])]
        text += ["", f"## {title}", "", *pipe_table(header, lines)]
    text += [
        "",
        "## A row that alone has its level of a factor",
        "",
        "Its row of the Hessian, divided by the entry of the intercept, is the row. The mean score of the level has the sign "
        "of its outcome. No search is needed, whatever the number of rows.",
        "",
        *pipe_table(
            ["rows", "row and outcome computed, %"], [[n, percent(one)] for n, one in single]
        ),
        "",
    ]
    (arguments.out / "disclosure.md").write_text("\n".join(text), encoding="utf-8")


if __name__ == "__main__":
    main()
