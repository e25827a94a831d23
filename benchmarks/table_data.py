"""Compare fits of real data sets with statsmodels' pooled fit: `python -m benchmarks.table_data`.

Those that ship inside scikit-learn and statsmodels, split over clients by a column or at random, with no argument
but response, client and family. Asked: estimates within 0.25 standard errors of statsmodels', standard errors
within 10 % of its heteroskedasticity-robust ones (HC0), or a warning that says why not.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import statsmodels.api as sm

from jaxlsgd import fit_table

HERE = Path(__file__).resolve().parent
_FAMILIES = {
    "gaussian": sm.families.Gaussian,
    "logistic": sm.families.Binomial,
    "poisson": sm.families.Poisson,
}


class Case(NamedTuple):
    """A data set."""

    load: Callable[[], pd.DataFrame]
    response: str
    client: str
    family: str


def _split(frame: pd.DataFrame, clients: int) -> pd.DataFrame:
    """Split rows over clients of unequal size, at random."""
    rng = np.random.default_rng(0)
    share = np.arange(1.0, clients + 1)
    return frame.assign(client=rng.choice(clients, len(frame), p=share / share.sum()))


def diabetes() -> pd.DataFrame:
    """442 patients, 10 columns."""
    from sklearn.datasets import load_diabetes

    return _split(load_diabetes(as_frame=True).frame, 5)


def breast_cancer() -> pd.DataFrame:
    """569 tumours; four means, as all thirty columns separate the two kinds."""
    from sklearn.datasets import load_breast_cancer

    frame = load_breast_cancer(as_frame=True).frame
    columns = ["mean radius", "mean texture", "mean smoothness", "mean symmetry", "target"]
    return _split(frame[columns], 5)


def fair() -> pd.DataFrame:
    """6,366 women; an affair or none, by occupation."""
    frame = sm.datasets.fair.load_pandas().data
    frame["affair"] = (frame["affairs"] > 0).astype(int)
    return frame.drop(columns=["affairs", "occupation_husb"])


def randhie() -> pd.DataFrame:
    """20,190 insured, visits to a doctor."""
    return _split(sm.datasets.randhie.load_pandas().data, 10)


def star98() -> pd.DataFrame:
    """303 school districts, the share of pupils above the national median."""
    frame = sm.datasets.star98.load_pandas().data
    frame["above"] = frame["NABOVE"] / (frame["NABOVE"] + frame["NBELOW"])
    columns = ["LOWINC", "PERASIAN", "PERBLACK", "PERHISP", "AVYRSEXP", "AVSALK", "PTRATIO"]
    return _split(frame[["above", *columns]], 4)


CASES = {
    "diabetes": Case(diabetes, "target", "client", "gaussian"),
    "breast cancer": Case(breast_cancer, "target", "client", "logistic"),
    "fair": Case(fair, "affair", "occupation", "logistic"),
    "randhie": Case(randhie, "mdvis", "client", "poisson"),
    "star98": Case(star98, "above", "client", "logistic"),
}


def compare(name: str, **more: Any) -> dict[str, Any]:
    """Compare our fit with that of statsmodels."""
    case = CASES[name]
    frame = case.load()
    found = fit_table(frame, response=case.response, client=case.client, family=case.family, **more)
    X = frame.drop(columns=[case.response, case.client])
    center, scale = X.mean(), X.std()
    theirs = sm.GLM(
        frame[case.response],
        sm.add_constant((X - center) / scale),  # statsmodels minds the scale of columns
        family=_FAMILIES[case.family](),
    ).fit(cov_type="HC0")
    ours = found.coefficients()
    slopes = theirs.params.to_numpy()[1:] / scale.to_numpy()
    errors = theirs.bse.to_numpy()[1:] / scale.to_numpy()
    gap = np.abs(ours.estimate[1:] - slopes) / errors
    ratio = ours.std_error[1:] / errors
    return {
        "rows": len(frame),
        "clients": len(found.sizes),
        "columns": len(slopes),
        "gap": float(gap.max()),
        "least": float(ratio.min()),
        "most": float(ratio.max()),
        "steps": found.communication.pilot,
        "warnings": found.warnings,
    }


def main() -> int:
    """Print the table and write it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.table_data", description=__doc__)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "table_data.md")
    arguments = parser.parse_args()
    lines = [
        "| data | family | rows | clients | columns | variance | largest gap, in standard errors | "
        "standard errors over statsmodels' | Newton steps | warnings |",
        "|---|---|--:|--:|--:|---|--:|--:|--:|---|",
    ]
    for name in CASES:
        for variance in ("clients", "pooled"):
            one = compare(name, variance=variance)
            lines.append(
                f"| {name} | {CASES[name].family} | {one['rows']:,} | {one['clients']} | {one['columns']} | "
                f"{variance} | {one['gap']:.1g} | {one['least']:.3f}–{one['most']:.3f} | {one['steps']} | "
                f"{'; '.join(one['warnings']) or '-'} |"
            )
            print(lines[-1], flush=True)
    page = f"# Real tables\n\n{(__doc__ or '').strip()}\n\n" + "\n".join(lines) + "\n"
    arguments.out.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
