"""Tables as they come: what is refused, in which words; files, streams and the command line."""

from __future__ import annotations

import contextlib
import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pandas as pd
import pytest
from refusals import Why, refused

from jaxlsgd import fit as jaxlsgd_fit
from jaxlsgd import fit_table, plug_in, problems, schedules
from jaxlsgd.cli import main, make_parser
from jaxlsgd.core.checks import Refusal
from jaxlsgd.regression import pilot, stream
from jaxlsgd.regression.design import Design, Model, design
from jaxlsgd.regression.families import family_of
from jaxlsgd.regression.fit_table import DEFAULTS
from jaxlsgd.regression.formulas import FUNCTIONS


def table(n: int = 300, clients: int = 3, seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame({"age": rng.normal(50, 10, n), "dose": rng.exponential(1.0, n)})
    z = 0.05 * (frame["age"] - 50) + 0.5 * frame["dose"] - 0.5
    frame["sick"] = (rng.uniform(size=n) < 1 / (1 + np.exp(-z))).astype(int)
    frame["site"] = [f"s{k}" for k in rng.integers(0, clients, n)]
    return frame


def fit(frame: Any, **more: Any):
    return fit_table(frame, **{"response": "sick", "client": "site", "family": "logistic", **more})


def with_column(name: str, values: Callable[[pd.DataFrame], Any]) -> pd.DataFrame:
    frame = table()
    frame[name] = values(frame)
    return frame


REFUSED = {
    "a column that is not there": (
        lambda: fit(table(), response="sik"),
        ("response", "unknown", "'sick'"),
    ),
    "a column like no other": (
        lambda: fit(table(), response="nope"),
        ("response", "unknown", "'age, dose, sick, site'"),
    ),
    "a client column that is not there": (
        lambda: fit(table(), client="sites"),
        ("client", "unknown", "'site'"),
    ),
    "a column of a formula that is not there": (
        lambda: fit(table(), response=None, formula="sick ~ agee"),
        ("formula", "unknown", "'age'"),
    ),
    "a formula that cannot be read": (
        lambda: fit(table(), response=None, formula="sick ~~ ("),
        ("formula", "value", "'sick ~~ ('"),
    ),
    "a formula without a response": (
        lambda: fit(table(), formula="age + dose"),
        ("formula", "missing", "'sick ~ age + dose'"),
    ),
    "a response that is text": (
        lambda: fit(with_column("sick", lambda f: np.where(f["sick"] == 1, "yes", "no"))),
        ("response 'sick'", "type", "frame['sick'] == 'yes'"),
    ),
    "a response that is no share": (
        lambda: fit(with_column("sick", lambda f: f["sick"] + 1)),
        ("response 'sick'", "data", "2.0"),
    ),
    "a response that never varies": (
        lambda: fit(with_column("sick", lambda f: 0)),
        ("response 'sick'", "data", "0 in all 300 rows"),
    ),
    "a negative count": (
        lambda: fit(with_column("sick", lambda f: f["sick"] - 1), family="poisson"),
        ("response 'sick'", "data", "-1.0"),
    ),
    "a column of text": (
        lambda: fit(with_column("ward", lambda f: np.where(f["age"] > 50, "a", "b"))),
        ("column 'ward'", "type", "C(ward)"),
    ),
    "a constant column": (
        lambda: fit(with_column("one", lambda f: 7.0)),
        ("column 'one'", "data", "'7 in every row'"),
    ),
    "collinear columns": (
        lambda: fit(with_column("months", lambda f: 12 * f["age"] + 3)),
        ("columns", "data", "'age and months'"),
    ),
    "perfect separation": (
        lambda: fit(with_column("sick", lambda f: (f["age"] > 50).astype(int))),
        ("columns", "data", "separate", "'age'"),
    ),
    "a column that tells the response": (
        lambda: fit(with_column("told", lambda f: 2.0 * f["sick"] - 1)),
        ("columns", "data", "separate", "'told'"),
    ),
    "a level of a factor that settles the response": (
        lambda: fit(
            with_column("ward", lambda f: np.where((f["sick"] == 1) & (f["age"] > 55), "x", "y")),
            response=None,
            formula="sick ~ dose + C(ward)",
        ),
        ("columns", "data", "separate", "'C(ward)[T.y]'"),
    ),
    "missing values": (
        lambda: fit(with_column("dose", lambda f: f["dose"].where(f.index != 7))),
        ("frame", "data", "1 of 'dose'", "row 7", "missing='drop'"),
    ),
    "infinite values": (
        lambda: fit(with_column("dose", lambda f: f["dose"].where(f.index != 7, np.inf))),
        ("column 'dose'", "not_finite"),
    ),
    "no rows": (lambda: fit(table().iloc[:0]), ("frame", "data", "'0 rows")),
    "fewer rows than columns": (
        lambda: fit(pd.concat([table().iloc[:2]])),
        ("frame", "data", "3 coefficients"),
    ),
    "no table": (lambda: fit(np.zeros((3, 3))), ("frame", "type")),
    "a family that is not there": (
        lambda: fit(table(), family="logit"),
        ("family", "choice", "'logistic'"),
    ),
    "an option that is not there": (
        lambda: fit(table(), target="populaton"),
        ("target", "choice", "'population'"),
    ),
    "fresh rows with a small client": (
        lambda: fit(table(), rows="fresh"),
        ("rows", "data", "100", "client 's"),
    ),
    "a stream of a table in memory": (
        lambda: fit(table(), stream=True),
        ("stream", "unwanted"),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_words(case: str):
    act, why = REFUSED[case]
    with refused(*why):
        act()


# A formula is data: nothing in it is run but what is listed.


def small_frame() -> pd.DataFrame:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.exponential(size=(60, 4)), columns=["y", "x", "a b", "dose (mg)"])
    return frame.assign(w=rng.choice(list("abc"), 60))


FORMULAS = {
    "y ~ x + 1": ["Intercept", "x"],
    "y ~ 0 + log(x) + sqrt(x)": ["log(x)", "sqrt(x)"],
    "log1p(y) ~ abs(x) + I((x > 1) & (x < 2))": ["Intercept", "abs(x)", "I((x > 1) & (x < 2))"],
    "y ~ `a b` + exp(`dose (mg)`)": ["Intercept", "a b", "exp(`dose (mg)`)"],
    "y ~ (x + `a b`)**2": ["Intercept", "x", "a b", "x:a b"],
    "y ~ C(w, Treatment('b'))": [
        "Intercept",
        "C(w, Treatment('b'))[T.a]",
        "C(w, Treatment('b'))[T.c]",
    ],
    "y ~ C(w, Sum())": ["Intercept", "C(w, Sum())[S.a]", "C(w, Sum())[S.b]"],
    "y ~ poly(x, 2)": ["Intercept", "poly(x, 2)[1]", "poly(x, 2)[2]"],
    "y ~ bs(x, df=4) - 1": [f"bs(x, df=4)[{i}]" for i in range(1, 5)],
    "y ~ cr(x, df=3) + cc(x, df=3)": None,
    "y ~ center(x) + scale(x, ddof=0) + sin(x) + cos(x) + expm1(x) + log2(x) + log10(x)": None,
}


def designed(frame: pd.DataFrame, formula: str) -> Design:
    return design(frame, Model(None, None, None, formula, True, "refuse"))


@pytest.mark.parametrize("formula", FORMULAS)
def test_formulas_of_listed_functions_are_read(formula: str):
    frame = small_frame()
    plan = designed(frame, formula)
    assert FORMULAS[formula] is None or list(plan.names) == FORMULAS[formula]
    block = plan.read(frame)
    assert block.X.shape == (60, len(plan.names)) and np.isfinite(block.X).all()


# By formula, the offending piece and what else the refusal says.
OTHER_PYTHON = {
    'y ~ __import__("os").system("echo hi")': ("__import__", "and the functions log, log2"),
    'y ~ I(__import__("os").system("echo hi"))': ("__import__", ""),
    "y ~ x.__class__": ("x.__class__", "be a column"),
    "y ~ I(x.__class__)": ("I(x.__class__)", ""),
    "y ~ x.map(print)": ("x.map(print)", ""),
    "y ~ x[0]": ("x[0]", ""),
    "y ~ `x`[0]": ("[", ""),
    "y ~ (lambda: 1)()": ("lambda", ""),
    "y ~ I((lambda: 1)())": ("I((lambda: 1)())", ""),
    "y ~ I([x for _ in x])": ("I([x for _ in x])", ""),
    "y ~ {x + 1}": ("{x + 1}", "arithmetic is I(x + 1)"),
    'y ~ Q("a b")': ('Q("a b")', "backticks"),
    "y ~ np.log(x)": ("np.log(x)", "write log(...)"),
    "y ~ lg(x)": ("lg(x)", "did you mean 'log'?"),
    'y ~ eval("1")': ("eval", ""),
    'y ~ ｅｖａｌ("1")': ("ｅｖａｌ", ""),
    "y ~ I(eval)": ("'eval'", "be a column"),
    "y ~ I(frame)": ("'frame'", "be a column"),  # a name of the functions that call formulaic
    "y ~ log(x, _state=x)": ("log(x, _state=x)", ""),
    "y ~ log(*x)": ("log(*x)", ""),
    'y ~ I(f"{x}")': ('I(f"{x}")', ""),
    "y ~ I(x := 1)": ("I(x := 1)", ""),
    "y ~ I(9**9**9**9)": ("9**9**9**9", ""),
    "y ~ I('a' * 10)": ("I('a' * 10)", ""),
    # Texts that formulaic would write into code of its own.
    """y ~ C(w, Treatment('a", print(), "'))""": ("print()", ""),
    """y ~ C(`a" + print() + "b`, "_formulaic_a____print______b")""": ("print()", ""),
    "y ~ x > 1": (">", "I(x > 3)"),
    "y ~ x | w": ("'|'", ""),
    "y ~ .": ("'.'", "name the columns"),
    "y ~ 'x'": ("'x'", ""),
    "y ~ log(x": ("log(x", "cannot be used"),
    "y ~ log(\x00)": ("log(", ""),
    "y ~ ünï": ("ünï", "be a column"),
    "y ~ I(" + "(" * 4000 + "x" + ")" * 4000 + ")": ("((((", ""),
    "y ~ I(" + "-" * 900 + "x)": ("----", ""),
    "y ~ " + "x" * 20_000: ("20004", "at most 10,000 characters"),
    "y ~ " + "*".join(["x", "w"] * 40): ("x*w*x*w", "at most 10,000 terms"),
    "y ~ (x + w)**99": ("**99", "at most 10,000 terms"),
}


@pytest.mark.parametrize("formula", OTHER_PYTHON)
def test_other_python_in_a_formula_is_refused_and_not_run(formula: str, monkeypatch):
    called = []
    monkeypatch.setattr("os.system", called.append)
    monkeypatch.setattr("builtins.print", lambda *given: called.append(given))
    piece, words = OTHER_PYTHON[formula]
    with pytest.raises(Refusal) as caught:
        designed(small_frame(), formula)
    text = str(caught.value)
    assert caught.value.argument == "formula"
    assert piece in text.partition("got ")[2] and words in text
    assert len(text) < 600
    assert not called


def test_pieces_put_together_at_random_are_read_or_refused():
    pieces = (
        *(
            "y",
            "x",
            "`a b`",
            "`",
            '"',
            "'",
            "(",
            ")",
            "[",
            "]",
            "{",
            "}",
            "~",
            "+",
            "-",
            "*",
            "**",
            "^",
        ),
        *(
            ":",
            "/",
            "%in%",
            "%",
            "|",
            ".",
            "log(",
            "C(",
            "I(",
            "__import__",
            "eval(",
            "lambda",
            "1",
        ),
        *(
            "2.5",
            "0",
            ",",
            "=",
            "_state=",
            "\\",
            "\n",
            " ",
            "np.",
            "w",
            "'b'",
            "if",
            "for",
            "<",
            "@",
            "#",
        ),
    )
    rng, frame = np.random.default_rng(0), small_frame()
    for _ in range(500):
        formula = "y ~ " + "".join(rng.choice(pieces, rng.integers(1, 9)))
        # Any other error than a refusal fails the test.
        with contextlib.suppress(ValueError):
            designed(frame, formula)


def test_command_line_refuses_python_in_a_formula(tmp_path: Path, capsys):
    small_frame().to_csv(tmp_path / "data.csv", index=False)
    command = ["fit", str(tmp_path / "data.csv"), "--formula"]
    assert main([*command, 'y ~ __import__("os").system("echo hi")']) == 2
    error = capsys.readouterr().err
    assert (
        error.startswith("jaxlsgd: error: --formula: must be made of columns")
        and error.count("\n") == 1
    )
    with pytest.raises(SystemExit):
        main(["fit", "--help"])
    told = capsys.readouterr().out
    assert all(f"{name}" in told for name in FUNCTIONS)


@pytest.mark.parametrize(
    "piece",
    [
        *("bs(x, df=1000000000)", "bs(x, 10**9)", "bs(x, 5, None, 100000)", "bs(x, df=-3)"),
        *("poly(x, 100000)", "cr(x, df=1e9)", "cc(x, df=101)", f"bs(x, knots={[1] * 101})"),
    ],
)
def test_functions_that_would_make_too_many_columns(piece: str):
    with refused("formula"):
        designed(small_frame(), f"y ~ {piece}")


def test_levels_that_would_make_too_many_columns(monkeypatch: pytest.MonkeyPatch):
    rng = np.random.default_rng(0)
    frame = table(1500)
    frame["a"], frame["b c"] = (rng.permutation(1500) % k for k in (140, 130))
    frame["t"] = frame["a"].map("t{}".format)
    monkeypatch.setattr("formulaic.model_matrix", None)  # it is refused before
    for right in ("C(a):C(`b c`)", "t * C(`b c`, Treatment(base=3))", "(t + C(`b c`)) ** 2"):
        with refused("formula", "data", "10,000"):
            fit(frame, response=None, formula=f"sick ~ {right}")
    monkeypatch.setattr("jaxlsgd.regression.formulas.memory", lambda: 2**20)
    with refused("formula", "memory"):
        fit(frame, response=None, formula="sick ~ t")


def test_a_formula_without_a_column(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    table().to_csv(path := tmp_path / "data.csv", index=False)
    with refused("formula", "missing"):
        fit(path, response=None, formula="sick ~ 0")
    assert main(["fit", str(path), "--formula", "sick ~ 0"]) == 2
    assert capsys.readouterr().err.startswith("jaxlsgd: error: --formula: must have a column")


@pytest.mark.parametrize("family", ["gaussian", "logistic", "huber"])
def test_a_level_of_one_row_is_named(family: str):
    """Its fitted value is its response, so that nothing says how sure its coefficient is."""
    frame = with_column("ward", lambda f: np.where(f.index == 5, "rare", f["site"]))
    frame["share"] = np.where(frame.index == 5, 0.3, frame["sick"])
    for variance in ("clients", "HC3"):
        with refused("column 'ward[rare]'", "data"):
            fit(frame, response=None, family=family, formula="share ~ 0 + ward", variance=variance)


FOREIGN = {"tau": 0.5, "delta": 1.0, "bandwidth": 0.1, "dispersion": 2.0}


@pytest.mark.parametrize("option", FOREIGN)
def test_an_option_of_another_family(option: str, csv: Path):
    with refused(option, "unwanted"):
        fit(table(), **{option: FOREIGN[option]})
    command = ["fit", str(csv), "--response", "sick", "--features", "age"]
    assert main([*command, f"--{option}", str(FOREIGN[option])]) == 2


# What is changed in the table, with the refused argument.
EXTREME = {
    "a column of 1e160": ({"dose": 1e160}, "column 'dose'"),
    "a column of 1e-160": ({"dose": 1e-160}, "column 'dose'"),
    "a response of 1e200": ({"age": 1e200}, "response 'age'"),
    "an offset of 700": ({"shift": 700.0}, "offset 'shift'"),
    "an offset of a million people": ({"shift": 1e6}, "offset 'shift'"),
    "an exposure of 1e300": ({"time": 1e300}, "exposure 'time'"),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("case", EXTREME)
def test_extreme_numbers(case: str):
    factors, argument = EXTREME[case]
    frame = table().assign(shift=1.0, time=1.0)
    frame = frame.assign(**{name: frame[name] * factor for name, factor in factors.items()})
    used = {"time": "exposure", "shift": "offset"}
    counts = {used[name]: name for name in factors if name in used}
    counts |= {"response": "sick", "family": "poisson"}
    given = {"response": "age", "family": "gaussian"} if "response" in argument else counts
    with refused(argument, "data"):
        fit_table(frame, features=["dose"], client="site", **given)


@pytest.mark.filterwarnings("error")
def test_newton_that_has_not_converged_is_refused():
    """Newton's steps from a mean that is far too large are about 1: 49 are taken, and 65 are too many."""
    frame = table().assign(shift=49.0)
    given = {"client": "site", "family": "poisson", "response": "sick", "features": ["age"]}
    far, near = fit_table(frame, offset="shift", **given), fit_table(frame, **given)
    np.testing.assert_allclose(far.bse, near.bse, rtol=1e-6)
    np.testing.assert_allclose(far.params["age"], near.params["age"], rtol=1e-6)
    objective = pilot.Objective(family_of("poisson"), np.zeros(1), np.zeros(1))
    y, shift = frame["sick"].to_numpy(float), np.full(300, 65.0)
    with refused("columns", "data"):
        pilot.minimise(objective, np.ones((300, 1)), y, np.full(300, 1 / 300), ("one",), shift)


@pytest.mark.parametrize(
    ("option", "hint"), [("levl", "did you mean 'level'?"), ("zzz", "it takes bandwidth, client")]
)
def test_an_option_that_fit_table_does_not_have(option: str, hint: str):
    with pytest.raises(TypeError) as caught:
        fit(table(), **{option: 1})
    assert str(caught.value).startswith(f"fit_table: has no option {option!r}; {hint}")


def test_text_that_spells_numbers_is_read():
    frame = table()
    plain = fit(frame)
    spelt = frame.assign(sick=frame["sick"].astype(str), dose=frame["dose"].map(repr))
    assert fit(spelt).estimate == plain.estimate


def test_dropped_rows_are_counted():
    frame = with_column("dose", lambda f: f["dose"].where(f.index % 50 != 7))
    found = fit(frame, missing="drop")
    assert found.dropped == 6
    assert sum(found.sizes.values()) == 294
    assert "6 rows dropped, with missing values" in str(found)


GAPS = {"client": ["", "NA", " "], "ward": ["null", "N/A", "<NA>"], "dose": ["NaN", "#N/A", "na"]}


@pytest.mark.parametrize("kind", ["pandas", "category", "csv", "parquet", "csv stream"])
def test_gaps_are_spelt_alike_everywhere(tmp_path: Path, monkeypatch, kind: str):
    """Clients, factors and numbers, also in a later block of a stream: nine gaps in nine rows."""
    monkeypatch.setattr(stream, "CHUNK", 1200)
    monkeypatch.setattr(stream, "PILOT_ROWS", 2000)
    monkeypatch.setattr("jaxlsgd.regression.files.BLOCK_BYTES", 1 << 16)
    streamed = kind == "csv stream"
    frame = table(6000 if streamed else 300).rename(columns={"site": "client"})
    frame["ward"] = np.where(frame.index % 3 == 0, "a", "b")
    frame["dose"] = frame["dose"].map(repr)
    gaps = [(name, text) for name, texts in GAPS.items() for text in texts]
    for i, (name, text) in enumerate(gaps, start=len(frame) - 200):
        frame.loc[i, name] = text
    source: Any = frame.assign(dose=pd.to_numeric(frame["dose"], errors="coerce"))
    if kind == "category":
        source = source.astype({"ward": "category", "client": "category"})
    elif kind == "parquet":
        source.to_parquet(source := tmp_path / "gaps.parquet")
    elif kind != "pandas":
        frame.to_csv(source := tmp_path / "gaps.csv", index=False)
    given = {
        "client": "client",
        "formula": "sick ~ age + dose + C(ward)",
        "response": None,
        "stream": True if streamed else None,
    }
    with refused("frame", "data") as caught:
        fit(source, **given)
    assert all(f"3 of '{name}'" in str(caught.value) for name in GAPS)
    found = fit(source, missing="drop", **given)
    assert found.dropped == 9
    assert list(found.sizes) == ["s0", "s1", "s2"]
    assert found.names == ("Intercept", "age", "dose", "C(ward)[T.b]")


@pytest.mark.parametrize("gap", [" NA", "nan ", "  ", "\t", "nAn", " " * 30 + "n/a"])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_gap_among_numbers_makes_no_factor(tmp_path: Path, monkeypatch, gap: str, streamed: bool):
    """Arrow matches gaps to the letter, and would read the column as text."""
    monkeypatch.setattr(stream, "CHUNK", 1200)
    monkeypatch.setattr(stream, "PILOT_ROWS", 2000)
    monkeypatch.setattr("jaxlsgd.regression.files.BLOCK_BYTES", 1 << 16)
    n = 6000 if streamed else 300
    frame = table(n).assign(visits=np.arange(n) % 3, ward=np.where(np.arange(n) % 5, "a", "b"))
    truth = frame.drop(index=[7, 9, n - 3])
    frame = frame.astype({"visits": object})
    frame.loc[[7, n - 3], "visits"], frame.loc[9, "ward"] = gap, gap
    frame.to_csv(path := tmp_path / "gaps.csv", index=False)
    given = {"response": None, "formula": "sick ~ age + visits + ward", "family": "gaussian"}
    found = fit(path, missing="drop", stream=streamed, **given)
    assert found.names == ("Intercept", "age", "visits", "ward[T.b]")
    assert found.dropped == 3
    if not streamed:
        assert found.estimate == fit(truth, **given).estimate
        frame.loc[7, "visits"] = "none"  # which is a level
        frame.to_csv(path, index=False)
        assert "visits[T.none]" in fit(path, missing="drop", **given).names


def test_a_new_row_with_a_spelt_gap_has_no_prediction():
    found = fit(table())
    new = found.predict(pd.DataFrame({"age": ["40", "NA"], "dose": [1.0, 1.0]}))
    assert list(new["mean"].isna()) == [False, True]


@pytest.mark.parametrize(
    "more", [{"client": "lists"}, {"response": None, "formula": "sick ~ lists"}]
)
def test_a_column_of_lists(more: dict[str, Any]):
    frame = table(30).assign(lists=[np.zeros(2)] * 30)
    with refused("column 'lists'", "type"):
        fit(frame, **more)


def test_odd_clients_are_met():
    """One client; a client with one row; a client that lacks a level of a factor."""
    frame = table()
    one = fit(frame, client=None, features=["age", "dose"])
    assert "there is one client" in " ".join(one.warnings)
    frame["site"] = np.where(frame.index == 0, "alone", frame["site"])
    frame["ward"] = np.where((frame["site"] == "s1") | (frame.index % 3 == 0), "a", "b")
    found = fit(frame, response=None, formula="sick ~ age + C(ward)")
    assert found.names == ("Intercept", "age", "C(ward)[T.b]")
    assert found.sizes["alone"] == 1
    assert "one row only of alone" in " ".join(found.warnings)
    assert np.isfinite(found.coefficients().std_error).all()


def test_rare_responses_are_fitted_and_said():
    """1 % of the rows: estimates within 0.1 standard errors of the minimiser, and a word about it."""
    rng = np.random.default_rng(3)
    frame = table(4000, seed=1)
    frame["sick"] = (rng.uniform(size=4000) < 0.006 * frame["dose"].clip(upper=6)).astype(int)
    found = fit(frame)
    import statsmodels.api as sm

    X = sm.add_constant(frame[["age", "dose"]])
    theirs = sm.GLM(frame["sick"], X, family=sm.families.Binomial()).fit()
    gap = found.coefficients().estimate - theirs.params.to_numpy()
    assert np.all(np.abs(gap) < 0.1 * found.coefficients().std_error)
    assert "have the rarer response" in " ".join(found.warnings)


def test_what_could_not_be_reached_is_said():
    found = fit(table(), methods=["one_step"], max_passes=2)
    assert found.communication.passes == 2
    assert "% of the sample's after 2 passes" in found.warnings[0]
    assert "Warnings" in str(found)


def test_a_fit_of_a_dataset_says_what_it_is_about():
    rng = np.random.default_rng(0)
    rows, labels = rng.normal(size=(2, 20, 1)), rng.normal(size=(2, 20))
    problem = problems.dataset(rows, labels, loss="squared")
    plan = schedules.paper("C5").plan(schedules.power_decay(0.5), num_steps=100)
    about = "Intervals are about the minimiser of these rows, not the population"
    result = jaxlsgd_fit(jax.random.key(0), problem, plan, methods=[plug_in()])
    assert about in str(result)
    other = jaxlsgd_fit(jax.random.key(0), problems.linear(1, 2), plan, methods=[plug_in()])
    assert about not in str(other)


# Files.


@pytest.fixture(scope="module")
def csv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tables") / "data.csv"
    table().to_csv(path, index=False)
    return path


def test_files_are_read_alike(csv: Path):
    parquet = csv.with_suffix(".parquet")
    table().to_parquet(parquet)  # not what `read_csv` makes of the file: pandas 2 loses last bits
    assert fit(csv).estimate == fit(parquet).estimate == fit(table()).estimate


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("empty.csv", b"", ("file", "data", "empty.csv")),
        ("binary.csv", b"\x7fELF\0\0\1\2" * 50, ("file", "type", "binary")),
        ("odd.csv", b"a,b\n1,2\n1,2,3\n", ("file", "damaged", "odd.csv")),
        ("false.parquet", b"a,b\n1,2\n" * 10, ("file", "damaged", "false.parquet")),
        ("false.csv.gz", b"a,b\n1,2\n" * 10, ("file", "damaged", "false.csv.gz")),
        ("false.csv.bz2", b"a,b\n1,2\n" * 10, ("file", "damaged", "false.csv.bz2")),
        (
            "cut.csv.gz",
            gzip.compress(b"a,b\n1,2\n" * 999, mtime=0)[:-20],
            ("file", "damaged", "cut.csv.gz"),
        ),
        ("old.csv", "sick,site\n1,Zürich\n".encode("latin-1"), ("file", "value", "'site'")),
        ("header.csv", b"sick,site,age\n", ("frame", "data", "'0 rows of 3 columns'")),
    ],
)
def test_files_that_are_no_tables(tmp_path: Path, name: str, content: bytes, why: Why):
    (tmp_path / name).write_bytes(content)
    with refused(*why):
        fit(tmp_path / name)


def test_the_verb(csv: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    base = ["fit", str(csv), "--response", "sick", "--client", "site", "--family", "logistic"]
    assert main(base) == 0
    text = capsys.readouterr().out
    assert "Federated logistic regression of sick: 300 rows of 3 clients (site)" in text
    figure = tmp_path / "forest.png"
    assert main([*base, "--format", "json", "--plot", str(figure)]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["coefficients"][0]["estimate"] == fit(csv).estimate["Intercept"]
    assert figure.stat().st_size > 5000
    assert main(["fit", str(csv), "--response", "sic", "--client", "site"]) == 2
    assert "did you mean 'sick'?" in capsys.readouterr().err
    assert main(["fit", str(csv.with_name("none.csv")), "--response", "sick"]) == 1
    assert "No such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("", "--response: must be a column of the table, got None"),
        ("--response y --row-weights v", "--row-weights: must be a column"),
        ("--response y --level 95", "--level: must be a number strictly between 0 and 1"),
        ("--formula y~x", "gaps.csv: must have no missing values, got \"1 of 'x'\""),
        ("--formula y~x", "; --missing drop leaves such rows out"),
        ("--formula y~C(w) --test w", "--test: must be one of Intercept, C(w)[T.b], C(w)[T.c], C(w)"),
        ("--formula y~C(w) --test c(w)", "did you mean 'C(w)'?"),
    ],
)  # fmt: skip
def test_the_verb_refuses_by_the_names_of_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: str, words: str
):
    frame = small_frame()
    frame.loc[3, "x"] = np.nan
    frame.to_csv(tmp_path / "gaps.csv", index=False)
    assert main(["fit", str(tmp_path / "gaps.csv"), *given.split(), "--methods"]) == 2
    assert words in capsys.readouterr().err


def test_the_options_of_the_verb_are_those_of_the_function():
    """Names, defaults, choices and kinds of number follow from `fit_table`, which no other verb imports."""
    command, parser = ["fit", "data.csv"], make_parser()
    plain = vars(parser.parse_args(command))
    others = ("verb", "function", "file", "format", "plot", "ratios", "margins", "test", "predict")
    others += ("quiet",)  # instead of progress
    found = {name: plain[name] for name in plain if name not in others}
    assert {**found, "progress": None} == dict(DEFAULTS)
    numbers = ["--max-passes", "7", "--ridge", "1e-3", "--features", "age", "dose"]
    given = parser.parse_args([*command, *numbers, "--no-intercept", "--stream"])
    assert (given.intercept, given.stream, given.ridge) == (False, True, 1e-3)
    assert (given.max_passes, given.features) == (7, ["age", "dose"])
    with pytest.raises(SystemExit):
        parser.parse_args([*command, "--variance", "none"])
    code = "from jaxlsgd.cli import make_parser; make_parser(); import sys; print('jax' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False\n"


# Streams.


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stream, "CHUNK", 1200)
    monkeypatch.setattr(stream, "PILOT_ROWS", 2000)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("ending", [".csv", ".parquet"])
def test_a_stream_finds_what_many_passes_find(
    tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch
):
    """Within a standard error of the whole fit, and its standard error within a quarter of that one's."""
    monkeypatch.setattr("jaxlsgd.regression.files.BLOCK_BYTES", 1 << 16)
    monkeypatch.setattr("jaxlsgd.regression.files.BLOCK_ROWS", 1000)
    frame, path, told = table(30_000, seed=4), tmp_path / f"data{ending}", []
    frame.to_csv(path, index=False) if ending == ".csv" else frame.to_parquet(path)
    found = fit(path, stream=True, progress=told.append)
    whole = fit(frame)
    gap = found.coefficients().estimate - whole.coefficients().estimate
    assert np.all(np.abs(gap) < whole.coefficients().std_error)
    ratio = found.coefficients().std_error / whole.coefficients().std_error
    assert np.all(np.abs(np.log(ratio)) < 0.25)
    assert sum(found.sizes.values()) == 30_000  # 25 chunks, none left over
    assert found.communication.passes == 1
    assert told == sorted(told) and len(told) == 26 and told[-1] == 1.0  # 25 chunks, and the end
    rounds = [one.round for one in found.along]  # after 2, 4, 8, 16 and 25 chunks
    assert len(rounds) == 5 and np.all(np.diff(rounds) > 0)
    np.testing.assert_array_equal(found.along[-1].estimate, found.coefficients().estimate)


@pytest.mark.usefixtures("small_chunks")
def test_a_stream_that_is_sorted_by_client_is_refused(tmp_path: Path):
    frame = table(8000, seed=4).sort_values("site")
    frame.to_parquet(tmp_path / "sorted.parquet")
    with refused("file", "data", "random order", "stream=False"):
        fit(tmp_path / "sorted.parquet", stream=True)
    late = table(8000, seed=4)
    late.loc[7000, "sick"] = 2
    late.to_parquet(tmp_path / "late.parquet")
    with refused("response 'sick'", "data", "2"):
        fit(tmp_path / "late.parquet", stream=True)
    with refused("target", "conflict"):
        fit(tmp_path / "sorted.parquet", stream=True, target="sample")


@pytest.mark.usefixtures("small_chunks")
def test_a_stream_counts_dropped_rows(tmp_path: Path):
    frame = table(6000, seed=5)
    frame.loc[::1000, "age"] = np.nan
    frame.to_csv(tmp_path / "gaps.csv", index=False)
    found = fit(tmp_path / "gaps.csv", stream=True, missing="drop")
    assert found.dropped == 6
    assert sum(found.sizes.values()) == 5994  # the last chunk has 1,194
    frame.iloc[:-1100].to_csv(tmp_path / "stub.csv", index=False)
    short = fit(tmp_path / "stub.csv", stream=True, missing="drop")
    assert sum(short.sizes.values()) == 4800
    assert "the last 95 rows of the file were too few" in " ".join(short.warnings)
