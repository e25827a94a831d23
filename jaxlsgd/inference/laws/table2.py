"""The paper's Table 2 three ways: as printed, exact, and simulated again as the paper describes."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import root_scalar
from scipy.special import ndtr

from jaxlsgd.core import checks
from jaxlsgd.inference.laws.critical_values import PAPER_GRID, critical_value, paper_value
from jaxlsgd.inference.laws.pivot_law import FloatArray

Row = dict[str, float]

# 1,000 paths of 1,000 float32 steps are 4 MB: small on any device, and enough work to fill one.
_CHUNK = 1_000


def table2(replications: int = 50_000, steps: int = 1_000, seed: int = 0) -> list[Row]:
    """Critical values of t*(beta) for every cell of Table 2: the paper's, exact, and simulated.

    A path is B(i/steps) = sum of i normals / sqrt(steps), and t* = B(1)/sqrt(mean_i (B(r_i) - g(r_i) B(1))^2).
    The law is symmetric, so the quantile is that of a Gaussian kernel estimate (Scott's rule) on t* and -t*.
    All four beta share their paths, so that their errors are correlated.

    Args:
      replications: number of paths, at least 100.
      steps: steps per path, at least 10.
      seed: of `jax.random.key`, at least 0.

    Returns:
      One dict per cell with beta, level (two-sided), paper, exact, simulated, standard_error (of simulated,
      Monte-Carlo), replications and steps.

    Example:
      >>> from jaxlsgd.inference.laws import table2
      >>> rows = table2.table2(replications=200, steps=50)
      >>> len(rows), rows[2]["paper"], round(rows[2]["exact"], 4)
      (16, 6.753, 6.7473)

    Reference: Table 2 of the paper and the text around it.
    """
    checks.count("replications", replications, 100)
    checks.count("steps", steps, 10)
    checks.count("seed", seed, 0)
    betas = tuple(dict.fromkeys(beta for beta, _ in PAPER_GRID))
    draws = dict(zip(betas, _simulate(betas, replications, steps, seed), strict=True))
    return [
        {
            "beta": beta,
            "level": level,
            "paper": paper_value(beta, level),
            "exact": critical_value(level, beta=beta),
            **_smoothed_quantile(draws[beta], level),
            "replications": replications,
            "steps": steps,
        }
        for beta, level in PAPER_GRID
    ]


def format_table(rows: Sequence[Row]) -> str:
    """The rows of `table2` as a text table."""
    lines = [" beta  level    paper    exact  simulated  (std. error)  paper - exact"]
    for row in rows:
        difference = 100 * (row["paper"] / row["exact"] - 1)
        lines.append(
            f"{row['beta']:5.3f}  {row['level']:5.2f}  {row['paper']:7.4f}  {row['exact']:7.4f}"
            f"    {row['simulated']:7.4f}      ({row['standard_error']:.4f})       {difference:+6.2f} %"
        )
    return "\n".join(lines)


def _simulate(betas: tuple[float, ...], replications: int, steps: int, seed: int) -> FloatArray:
    """Draws of t*(beta), shape (betas, replications), one chunk on the device at a time."""
    r = np.arange(1, steps + 1) / steps
    g = jnp.asarray([r ** (1 / (1 - beta)) for beta in betas], jnp.float32)
    key = jax.random.key(seed)
    chunks = range(math.ceil(replications / _CHUNK))
    parts = [np.asarray(_chunk(jax.random.fold_in(key, i), g)) for i in chunks]
    return np.concatenate(parts).T[:, :replications].astype(np.float64)


@jax.jit
def _chunk(key: jax.Array, g: jax.Array) -> jax.Array:
    normals = jax.random.normal(key, (_CHUNK, g.shape[1]), jnp.float32)
    return jax.vmap(_statistic, in_axes=(0, None))(normals, g)


def _statistic(normals: jax.Array, g: jax.Array) -> jax.Array:
    """t* of one path for every row of g."""
    path = jnp.cumsum(normals) / math.sqrt(normals.size)
    return path[-1] / jnp.sqrt(jnp.mean((path - g * path[-1]) ** 2, axis=1))


def _smoothed_quantile(draws: FloatArray, level: float) -> Row:
    """The (1 + level)/2 quantile of the symmetrised kernel estimate, with its Monte-Carlo error."""
    width = draws.std(ddof=1) * draws.size ** (-1 / 5)

    def below(x: float) -> FloatArray:
        return (ndtr((x - draws) / width) + ndtr((x + draws) / width)) / 2

    top = float(np.abs(draws).max() + 10 * width)
    x = root_scalar(lambda x: float(below(x).mean()) - (1 + level) / 2, bracket=(0.0, top)).root
    slope = (below(x + width / 4).mean() - below(x - width / 4).mean()) / (width / 2)
    error = below(x).std(ddof=1) / math.sqrt(draws.size) / slope
    return {"simulated": x, "standard_error": float(error)}
