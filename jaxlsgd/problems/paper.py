"""The two problems of the paper's experiments, with the step sizes that go with them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from jaxlsgd.base import Problem
from jaxlsgd.problems.linear import linear
from jaxlsgd.problems.logistic import logistic

PAPER_STEP = {"linear": 0.5, "logistic": 2.0}  # γ_0 of γ_m = γ_0 m^(−0.505)

_DIM, _NUM_CLIENTS = 5, 10
# Table 3, plug-in, C1, t_T = 5,000: mean length 2 z √(v/t_T) of the interval of coordinate 0.
_LENGTH, _NUM_STEPS, _QUANTILE = 7.857e-2, 5_000, 1.959963984540054
_VARIANCE = _NUM_STEPS * (_LENGTH / (2 * _QUANTILE)) ** 2


def paper_problem(name: str) -> Problem:
    """A problem of the paper's experiments: d = 5, K = 10, equal weights, x_0 = 0.

    'logistic' is as stated there: homogeneous, x* = (0, ¼, ½, ¾, 1). 'linear' is as stated up to a
    scale. With the stated x*_k ~ N(0, I) the asymptotic variance v = (G⁻¹SG⁻ᵀ)₀₀ of the first
    coordinate is 0.64 on average, whereas the C1 plug-in length of Table 3 at t_T = 5,000,
    7.857e-2 = 2 z √(v/t_T), means v = 2.009. So x*_k = heterogeneity · N(0, I), drawn once from
    seed 0, with the heterogeneity h that makes v exactly that: v(h) = v(0) + h² (v(1) − v(0)).

    Args:
      name: 'linear' or 'logistic'.

    Returns:
      The problem; `PAPER_STEP[name]` is its γ_0.

    Example:
      >>> problem = paper_problem("linear")
      >>> round(float(problem.S[0, 0]), 3)
      2.009

    Reference:
      "Statistical Estimation and Inference via Local SGD in Federated Learning", section on
      numerical simulations, Tables 3 and 4.
    """
    if name not in sorted(PAPER_STEP):
        raise ValueError(f"name: must be one of {sorted(PAPER_STEP)}, got {name!r}")
    if name == "logistic":
        return logistic(_DIM, _NUM_CLIENTS)
    none, unit = (_variance(linear(_DIM, _NUM_CLIENTS, heterogeneity=h)) for h in (0.0, 1.0))
    return linear(_DIM, _NUM_CLIENTS, heterogeneity=math.sqrt((_VARIANCE - none) / (unit - none)))


def _variance(problem: Problem) -> Any:
    return np.linalg.solve(problem.G, np.linalg.solve(problem.G, problem.S).T)[0, 0]
