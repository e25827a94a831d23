"""Tables in memory are fitted by Newton's method: beside statsmodels, where clients are as unlike as they come.

Carriers, villages and stores differ in size, in where their columns lie, in their effects and in their noise, and some
lack levels of a factor. Runs of Local SGD on them fail their own test, and are refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from refusals import refused

from jaxlsgd import fit_table
from jaxlsgd.cli import main
from jaxlsgd.core.display import standard_errors
from jaxlsgd.regression import stream

FAMILIES = {
    "gaussian": sm.families.Gaussian(),
    "logistic": sm.families.Binomial(),
    "poisson": sm.families.Poisson(),
}


def carriers() -> pd.DataFrame:
    """Delays of 12 carriers, the largest 300 times as large as the smallest; most leave from one airport or two."""
    rng = np.random.default_rng(1)
    K, n = 12, 4000
    who = rng.choice(K, n, p=(share := np.geomspace(1, 300, K)) / share.sum())
    distance = np.exp(rng.normal(6.5, 0.6, K)[who] + 0.3 * rng.normal(size=n))
    hour = rng.integers(5, 23, n)
    airports = rng.dirichlet([0.3] * 3, K).cumsum(axis=1)
    airport = (rng.uniform(size=n)[:, None] > airports[who, :2]).sum(axis=1)
    y = rng.normal(8, 10, K)[who] + rng.normal(0.5, 1, K)[who] * hour - 0.01 * distance
    y += 5.0 * (airport == 0) + 20 * rng.standard_t(4, n) * np.exp(rng.normal(0, 0.5, K))[who]
    columns = {"y": y, "distance": distance, "hour": hour, "year": rng.integers(1990, 2024, n)}
    return pd.DataFrame({**columns, "airport": np.array(list("EJL"))[airport], "client": who})


def villages(family: str, n: int = 6000) -> pd.DataFrame:
    """190 villages: incomes over ten orders of magnitude, rates of insurance and visits of their own."""
    rng = np.random.default_rng(3)
    K, spread = 190, 1.0 if family == "poisson" else 2.0  # statsmodels fails to converge with 2
    who = rng.integers(0, K, n)
    income = np.exp(rng.normal(2, spread, K)[who] + spread * rng.normal(size=n))
    ill = rng.poisson(0.3 * np.exp(rng.normal(size=K))[who])
    school = np.minimum(rng.exponential(np.exp(rng.normal(size=K))[who]), 3).astype(int)
    if family == "logistic":
        y = (rng.uniform(size=n) < rng.beta(0.2, 1, K)[who]).astype(int)
    else:
        y = rng.poisson(np.exp(np.clip(0.2 * ill - 1 + rng.normal(size=K)[who], -5, 3)))
    columns = {"y": y, "income": income, "ill": ill, "school": np.array(list("abcd"))[school]}
    return pd.DataFrame({**columns, "client": who})


TABLES = {
    "gaussian": (carriers(), "y ~ distance + hour + year + C(airport)"),
    "logistic": (villages("logistic"), "y ~ income + ill + C(school)"),
    "poisson": (villages("poisson"), "y ~ income + ill + C(school)"),
}


def fitted(family: str, **more: Any) -> Any:
    frame, formula = TABLES[family]
    return fit_table(frame, formula=formula, client="client", family=family, **more)


@pytest.mark.parametrize("how", ["HC0", "cluster"])
@pytest.mark.parametrize("family", TABLES)
def test_the_default_is_what_statsmodels_has(family: str, how: str):
    """To 1e-6 of coefficients and standard errors; its columns are scaled, as it minds incomes of 1e5."""
    frame, formula = TABLES[family]
    model = sm.GLM.from_formula(formula, frame, family=FAMILIES[family])
    scale = np.abs(model.exog).max(axis=0)
    given = {"cov_kwds": {"groups": frame["client"]}} if how == "cluster" else {}
    theirs = sm.GLM(frame["y"], model.exog / scale, family=FAMILIES[family]).fit(
        cov_type=how, maxiter=200, tol=1e-14, **given
    )
    sampled = {"clients": "sampled", "variance": "CR1"}
    ours = fitted(family, **(sampled if how == "cluster" else {"variance": "HC0"}))
    assert list(ours.methods) == ["newton"]
    names = model.exog_names
    np.testing.assert_allclose(ours.params[names], theirs.params.to_numpy() / scale, rtol=1e-6)
    np.testing.assert_allclose(ours.bse[names], theirs.bse.to_numpy() / scale, rtol=1e-6)


def test_clients_as_they_are_by_default():
    """No NaN and no word of one, though some carriers lack a level of the factor."""
    assert carriers().groupby("client")["airport"].nunique().min() < 3
    for family in TABLES:
        found = fitted(family)
        assert np.isfinite(found.to_frame().to_numpy()).all()
        assert "nan" not in str(found)


@pytest.mark.parametrize("more", [{"methods": ["one_step"]}, {"target": "sample"}])
def test_a_run_that_fails_its_own_test_is_refused(more: dict[str, Any]):
    with refused("methods", "data") as caught:
        fitted("logistic", max_passes=20, **more)
    call = "target='population' without methods" if "target" in more else "leave methods out"
    assert call in str(caught.value)


def test_a_stream_that_fails_its_own_test_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(stream, "CHUNK", 6000)
    monkeypatch.setattr(stream, "PILOT_ROWS", 6000)
    frame = villages("logistic", 12_000)
    frame["client"] %= 10
    path = tmp_path / "villages.csv"
    frame.to_csv(path, index=False)
    given = ["--response", "y", "--client", "client", "--family", "logistic"]
    command = ["fit", str(path), "--features", "income", "ill", *given]
    assert main([*command, "--stream"]) == 2
    out, error = capsys.readouterr()
    assert out == "" and "stream=False without methods" in error
    assert main(command) == 0
    assert "nan" not in capsys.readouterr().out


def test_one_standard_error_is_singular():
    assert standard_errors(0.996) == "1 standard error"
    assert standard_errors(2.44) == "2.4 standard errors"
