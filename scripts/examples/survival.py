"""Survival by a Poisson regression: piecewise-exponential hazards, beside Cox's model of statsmodels.

A life is cut at some times. Each piece is a row with the time at risk in it, and whether the death was in it. A Poisson
regression of deaths with that time as exposure, and an intercept per piece, has the hazard ratios of a Cox model whose
baseline is constant between the cuts. With a cut at every death, and without the pieces in which a life is censored, it
is Cox's (with Breslow's ties). Rows of a federation are cut where they are: only cuts are agreed on. Stanford's heart transplants are in statsmodels: 69 patients.

Run with `python scripts/examples/survival.py`; needs the extra "data" and statsmodels.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import statsmodels.api as sm

import jaxlsgd


def pieces(lives: pd.DataFrame, time: str, died: str, cuts: list[float]) -> pd.DataFrame:
    """Return a row per life and interval in which it was at risk."""
    begin, end = np.array([0.0, *cuts]), np.array([*cuts, np.inf])
    parts = []
    for number, (low, high) in enumerate(zip(begin, end, strict=True)):
        here = lives[lives[time] > low]
        inside = here[time] <= high
        parts.append(
            here.assign(
                piece=number,
                at_risk=np.minimum(here[time], high) - low,
                deaths=((here[died] == 1) & inside).astype(int),
            )
        )
    return pd.concat(parts, ignore_index=True)


def compare(methods: tuple[str, ...] = ("one_step",)) -> tuple[jaxlsgd.TableFit, float, float]:
    """Return our fit, and the coefficient and standard error of age by PHReg."""
    lives = sm.datasets.heart.load_pandas().data
    cuts = list(np.quantile(lives["survival"][lives["censors"] == 1], np.arange(1, 8) / 8))
    rows = pieces(lives, "survival", "censors", cuts)
    ours = jaxlsgd.fit_table(
        rows,
        formula="deaths ~ age + C(piece)",
        family="poisson",
        exposure="at_risk",
        methods=methods,
    )
    cox = sm.PHReg(lives["survival"], lives[["age"]], status=lives["censors"]).fit()
    return ours, float(cox.params[0]), float(cox.bse[0])


if __name__ == "__main__":
    fit, coefficient, error = compare()
    print(fit.ratios())
    print(
        f"age: {fit.params['age']:.4f} ± {fit.bse['age']:.4f}; PHReg {coefficient:.4f} ± {error:.4f}"
    )
