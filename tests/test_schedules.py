"""Schedules, step sizes and plans: exact integers, the paper's numbers, and refusals."""

# Wrong types are passed on purpose.
# pyright: reportArgumentType=false, reportOperatorIssue=false

import doctest
import math
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
from refusals import refused
from work import counted

from jaxlsgd import schedules
from jaxlsgd.schedules import (
    PAPER_SCHEDULES,
    Plan,
    constant,
    constant_step,
    custom,
    custom_step,
    families,
    iterated_logarithmic,
    logarithmic,
    paper,
    plan,
    power,
    power_decay,
    step_size,
)

STEP = power_decay(0.5)

# Plug-in interval lengths of the paper's Table 4 (logistic, 1e-2), t_T -> one per schedule.
PAPER_LENGTHS = {
    5_000: (4.113, 5.081, 6.347, 5.949, 8.062),
    10_000: (2.903, 3.587, 4.681, 4.526, 6.320),
    20_000: (2.049, 2.534, 3.453, 3.456, 4.927),
    40_000: (1.448, 1.790, 2.544, 2.647, 3.821),
}


def verdicts(plan: Plan) -> dict[str, str]:
    return {row.label: row.verdict for row in plan.check()}


def test_docstring_examples_run():
    names = {name: getattr(schedules, name) for name in schedules.__all__}
    found = [doctest.testmod(module, extraglobs=names) for module in (families, plan, step_size)]
    assert sum(one.attempted for one in found) >= 12
    assert not any(one.failed for one in found)


def test_module_does_not_import_jax():
    code = "import sys, jaxlsgd.schedules; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- intervals ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (paper("C1"), [1, 1, 1, 1, 1, 1, 1, 1, 1]),
        (paper("C5"), [5, 5, 5, 5, 5, 5, 5, 5, 5]),
        (paper("Log"), [1, 2, 2, 3, 3, 3, 3, 4, 4]),
        (paper("P(1/3)"), [1, 2, 2, 2, 2, 2, 2, 2, 3]),
        (paper("P(1/2)"), [1, 2, 2, 2, 3, 3, 3, 3, 3]),
        (power(0.0, scale=2.5), [3, 3, 3, 3, 3, 3, 3, 3, 3]),
        (power(1 / 2, scale=2.0), [2, 3, 4, 4, 5, 5, 6, 6, 6]),
        (logarithmic(scale=1, power=2, base=math.e), [1, 2, 2, 3, 4, 4, 5, 5, 6]),
        (iterated_logarithmic(scale=4, power=0.5), [2, 3, 3, 4, 4, 4, 4, 4, 4]),
        (custom(np.array([3.0, 1.0, 2.0] * 3)), [3, 1, 2, 3, 1, 2, 3, 1, 2]),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_first_intervals(schedule, expected):
    E = schedule.intervals(9)
    assert E.dtype == np.int64
    assert E.tolist() == expected


@pytest.mark.parametrize("root", [2, 3, 4, 5])
def test_ceiling_of_perfect_powers(root):
    """n^r gives n, and n^r + 1 gives n + 1, for every n with n^r <= 1e13."""
    n = np.arange(1, min(30_000, int(1e13 ** (1 / root))) + 1, dtype=np.int64)
    assert np.array_equal(ceilings(power(1 / root), n**root), n)
    assert np.array_equal(ceilings(power(1 / root), n**root + 1), n + 1)


@pytest.mark.parametrize(("base", "most"), [(2, 43), (3, 27), (4, 21), (5, 17), (10, 12)])
def test_ceiling_of_perfect_logarithms(base, most):
    """m + 1 = base^k gives k, and the next m gives k + 1."""
    k = np.arange(1, most + 1, dtype=np.int64)
    m = np.array([base ** int(j) - 1 for j in k], dtype=np.int64)
    assert np.array_equal(ceilings(logarithmic(base=base), m), k)
    assert np.array_equal(ceilings(logarithmic(base=base), m + 1), k + 1)


def ceilings(schedule, m):
    """E'_m at chosen m far beyond what can be listed."""
    shape = families._SHAPES[schedule.family]
    x = schedule.scale * shape(m.astype(np.float64), schedule.exponent, schedule.base)
    return families._ceil(x)


def test_ceiling_guard_is_needed_and_used_by_intervals():
    m = np.arange(1, 10**6 + 1)
    assert np.ceil(7776.0 ** (1 / 5)) == 7 and power(1 / 5).intervals(7777)[-2:].tolist() == [6, 7]
    exact = np.rint(np.cbrt(m)).astype(np.int64)
    exact += exact**3 < m  # smallest n with n^3 >= m, in integers
    exact -= (exact - 1) ** 3 >= m
    assert np.array_equal(paper("P(1/3)").intervals(10**6), exact)
    roots = np.array([math.isqrt(int(j) - 1) + 1 for j in m[:100_000]])
    assert np.array_equal(paper("P(1/2)").intervals(100_000), roots)
    bits = np.array([int(j).bit_length() for j in m[:100_000]])  # ceil(log2(m+1))
    assert np.array_equal(paper("Log").intervals(100_000), bits)


@pytest.mark.parametrize(
    ("schedule", "name", "beta", "nu"),
    [
        (paper("C1"), "C1", 0.0, 1.0),
        (constant(np.int64(7)), "C7", 0.0, 1.0),
        (paper("Log"), "Log", 0.0, 1.0),
        (logarithmic(2, 3, math.e), "Log(2,3,e)", 0.0, 1.0),
        (iterated_logarithmic(2.0, 1.5), "LogLog(2,1.5)", 0.0, 1.0),
        (power(Fraction(1, 3)), "P(1/3)", 1 / 3, 9 / 8),
        (paper("P(1/2)"), "P(1/2)", 1 / 2, 4 / 3),
        (power(0.37, 2), "2*P(0.37)", 0.37, 1 / (1 - 0.37**2)),
        (power(1.5, allow_outside_theory=True), "P(3/2)", None, None),
        (custom([1, 2]), "custom[2]", None, None),
    ],
)
def test_names_and_limits(schedule, name, beta, nu):
    plan = schedule.with_warmup(0.0).plan(STEP, num_rounds=2)
    assert (schedule.name, plan.name) == (name, name)
    assert schedule.beta == plan.beta == (beta if beta is None else pytest.approx(beta))
    assert schedule.nu == plan.nu == (nu if nu is None else pytest.approx(nu))
    assert (plan.g is None) == (beta is None)
    if plan.g is not None:
        assert plan.g(0.25) == pytest.approx(0.25 ** (1 / (1 - beta)))


def test_paper_names_are_the_five_in_order():
    assert PAPER_SCHEDULES == ("C1", "C5", "Log", "P(1/3)", "P(1/2)")
    assert tuple(paper(name).name for name in PAPER_SCHEDULES) == PAPER_SCHEDULES
    assert paper("P(1/3)") == power(1 / 3) and hash(paper("Log")) == hash(logarithmic())


# --- plans and warm-up -------------------------------------------------------------------------


def test_warmup_of_c5_at_5000():
    plan = paper("C5").with_warmup(0.05).plan(STEP, num_steps=5000)
    assert (plan.warmup_rounds, plan.num_rounds, plan.num_steps) == (250, 1200, 5000)
    assert plan.E.tolist() == [1] * 250 + [5] * 950
    m = np.arange(1, 1201)
    np.testing.assert_allclose(plan.gamma, 0.5 * m**-0.505, rtol=1e-15)
    np.testing.assert_allclose(plan.eta, 0.5 * m**-0.505 / plan.E, rtol=1e-15)
    assert plan.ends[[0, 249, 250, -1]].tolist() == [1, 250, 255, 5000]
    assert plan.nu_hat == pytest.approx(5000 * (250 + 950 / 5) / 1200**2)
    assert plan.acf == 0.24


@pytest.mark.parametrize("num_steps", PAPER_LENGTHS)
def test_warmup_reading_gives_the_length_ratios_of_the_paper(num_steps):
    """Lengths go as sqrt(nu_hat); 1% is what the paper's three digits and 1,000 runs allow."""
    lengths = np.array(PAPER_LENGTHS[num_steps])
    plans = [paper(n).with_warmup(0.05).plan(STEP, num_steps=num_steps) for n in PAPER_SCHEDULES]
    nu_hat = np.array([plan.nu_hat for plan in plans])
    np.testing.assert_allclose(nu_hat / nu_hat[0], (lengths / lengths[0]) ** 2, rtol=0.01)


def test_warmup_as_a_share_of_rounds_would_not():
    """The other reading of Section 5 is off by far more than the tolerance above."""
    for name, length in zip(PAPER_SCHEDULES[1:], PAPER_LENGTHS[5000][1:], strict=True):
        E = paper(name).plan(STEP, num_steps=5000).E
        E = np.concatenate([np.ones(round(0.05 / 0.95 * len(E)), np.int64), E])
        nu_hat = E.sum() * (1 / E).sum() / len(E) ** 2
        assert nu_hat < 0.85 * (length / 4.113) ** 2


@pytest.mark.parametrize("name", PAPER_SCHEDULES)
@pytest.mark.parametrize("warmup", [0.0, 0.05, 0.5])
@pytest.mark.parametrize("num_steps", [3, 63, 64, 65, 1000, 4999])
def test_num_steps_is_met_exactly(name, warmup, num_steps):
    plan = paper(name).with_warmup(warmup).plan(STEP, num_steps=num_steps)
    w = round(warmup * num_steps)
    body = plan.E[w:]
    assert plan.num_steps == num_steps == plan.ends[-1] and plan.warmup_rounds == w
    assert (plan.E[:w] == 1).all()
    full = paper(name).intervals(len(body))
    assert np.array_equal(body[:-1], full[:-1]) and 1 <= body[-1] <= full[-1]


@pytest.mark.parametrize("name", PAPER_SCHEDULES)
@pytest.mark.parametrize("num_rounds", [2, 10, 400, 3000])
def test_num_rounds_finds_the_smallest_enough_warmup(name, num_rounds):
    plan = paper(name).with_warmup(0.05).plan(STEP, num_rounds=num_rounds)
    w = plan.warmup_rounds
    assert plan.num_rounds == num_rounds
    assert np.array_equal(plan.E[w:], paper(name).intervals(num_rounds - w))
    assert w >= round(0.05 * plan.num_steps)
    fewer = w - 1 + paper(name).intervals(num_rounds - w + 1).sum()
    assert w == 0 or w - 1 < round(0.05 * fewer)
    if w == round(0.05 * plan.num_steps):  # consistent, so both ways of asking agree
        again = paper(name).with_warmup(0.05).plan(STEP, num_steps=plan.num_steps)
        assert again == plan


def test_warmup_steps_over_equality_only_where_intervals_are_long():
    plan = constant(100).with_warmup(0.05).plan(STEP, num_rounds=100)
    # w = 83 would need round(0.05 * 1783) = 89, w = 84 needs 84: found exactly.
    assert (plan.warmup_rounds, plan.num_steps) == (84, 1684)
    skipped = constant(100).with_warmup(0.05).plan(STEP, num_rounds=101)
    assert skipped.warmup_rounds > round(0.05 * skipped.num_steps)


def test_custom_sequence_may_be_shorter_than_a_plan_with_warmup():
    plan = custom([5] * 95).with_warmup(0.05).plan(STEP, num_steps=500)
    assert plan.num_rounds == 25 + 95
    assert custom([5] * 95).with_warmup(0.05).plan(STEP, num_rounds=120) == plan
    with refused("sequence", "value", "96 rounds", "95 rounds"):
        custom([5] * 95).with_warmup(0.05).plan(STEP, num_rounds=121)


def test_plans_are_read_only_values():
    plan, same = (paper("C5").plan(STEP, num_rounds=4) for _ in range(2))
    assert plan == same and hash(plan) == hash(same) and plan.digest == same.digest
    other = paper("C5").plan(power_decay(0.4), num_rounds=4)
    assert plan != other and plan.digest != other.digest
    assert plan != Plan.from_arrays(plan.E, plan.eta) and plan != "plan"
    for array in (plan.E, plan.eta, plan.gamma, plan.ends):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 2
    assert repr(plan) == "Plan(C5, γ_m = 0.5 m^-0.505, num_rounds=4, num_steps=20)"


def test_from_arrays_copies_and_describes():
    E, eta = np.array([2, 3]), np.array([0.5, 0.25])
    plan = Plan.from_arrays(E, eta)
    E[0] = eta[0] = 9
    assert plan.E.tolist() == [2, 3] and plan.gamma.tolist() == [1.0, 0.75]
    assert plan.schedule == custom([2, 3]) and plan.step_size == custom_step([1.0, 0.75])
    assert (plan.nu, plan.beta, plan.g, plan.warmup_rounds) == (None, None, None, 0)


def test_prefix():
    plan = paper("P(1/2)").with_warmup(0.05).plan(STEP, num_steps=2000)
    part = plan.prefix(150)
    assert np.array_equal(part.E, plan.E[:150]) and np.array_equal(part.eta, plan.eta[:150])
    assert part.num_steps == plan.ends[149] and part.warmup_rounds == 100
    assert plan.prefix(60).warmup_rounds == 60 and plan.prefix(plan.num_rounds) == plan


def test_a_million_rounds_take_no_loop_over_rounds():
    with counted() as lines:
        assert paper("P(1/2)").with_warmup(0.05).plan(STEP, num_rounds=10**6).num_rounds == 10**6
        assert paper("C1").with_warmup(0.05).plan(STEP, num_steps=10**6).num_rounds == 10**6
    assert lines.run < 10_000


# --- refusals ----------------------------------------------------------------------------------

NAN, INF = math.nan, math.inf
REFUSED = [
    # (what is called, what the message must say)
    (lambda: constant(0), ("E", "value")),
    (lambda: constant(-3), ("E", "value")),
    (lambda: constant(2.5), ("E", "type")),
    (lambda: constant(NAN), ("E", "type")),
    (lambda: constant(2**31), ("E", "value", "2147483647")),
    (lambda: constant(True), ("E", "type")),
    (lambda: constant("5"), ("E", "type")),
    (lambda: logarithmic(scale=0), ("scale", "value")),
    (lambda: logarithmic(power=0), ("power", "value")),
    (lambda: logarithmic(base=1), ("base", "value")),
    (lambda: logarithmic(base=INF), ("base", "not_finite")),
    (lambda: iterated_logarithmic(power=-1), ("power", "value")),
    (lambda: iterated_logarithmic(scale=NAN), ("scale", "not_finite")),
    (lambda: power(1.0), ("beta", "value")),
    (lambda: power(-0.1), ("beta", "value")),
    (lambda: power(-0.1, allow_outside_theory=True), ("beta", "value")),
    (lambda: power(NAN, allow_outside_theory=True), ("beta", "not_finite")),
    (lambda: power(0.5, scale=-1), ("scale", "value")),
    (lambda: power(None), ("beta", "type")),
    (lambda: custom([]), ("sequence", "shape")),
    (lambda: custom([[1, 2]]), ("sequence", "shape")),
    (lambda: custom(3), ("sequence", "shape")),
    (lambda: custom([1, 0]), ("sequence[1]", "value")),
    (lambda: custom([1, 2.5]), ("sequence[1]", "value")),
    (lambda: custom([1, NAN]), ("sequence[1]", "not_finite")),
    (lambda: custom([1, True]), ("sequence", "type")),
    (lambda: custom(np.array([True])), ("sequence", "type")),
    (lambda: custom(["a"]), ("sequence", "type")),
    (lambda: custom([1, 2]).intervals(3), ("sequence", "value", "3 rounds", "2 rounds")),
    (lambda: custom([1, 2]).plan(STEP, num_steps=4), ("sequence", "value", "4 local", "3 local")),
    (lambda: custom([1, 2]).plan(STEP, num_rounds=3), ("sequence", "value", "3 rounds")),
    (lambda: paper("P(1/3"), ("name", "choice", "'P(1/3)'")),
    (lambda: paper("log"), ("name", "choice", "'Log'")),
    (lambda: paper("quadratic"), ("name", "choice")),
    (lambda: paper(5), ("name", "choice")),
    (lambda: constant(1).intervals(0), ("num_rounds", "value")),
    (lambda: constant(1).with_warmup(1.0), ("fraction", "value")),
    (lambda: constant(1).with_warmup(-0.1), ("fraction", "value")),
    (lambda: constant(1).with_warmup(NAN), ("fraction", "not_finite")),
    (lambda: constant(1).plan(0.5, num_steps=9), ("step_size", "type")),
    (lambda: constant(1).plan(STEP), ("num_steps", "conflict", "None")),
    (
        lambda: constant(1).plan(STEP, num_steps=3, num_rounds=3),
        ("num_steps", "conflict", "'num_steps': 3"),
    ),
    (lambda: constant(1).plan(STEP, num_steps=0), ("num_steps", "value")),
    (lambda: constant(1).plan(STEP, num_steps=5e3), ("num_steps", "type")),
    (lambda: constant(1).plan(STEP, num_rounds=True), ("num_rounds", "type")),
    (lambda: constant(1).plan(STEP, num_steps=10**400), ("num_steps", "value")),
    (
        lambda: constant(1).with_warmup(0.95).plan(STEP, num_steps=5),
        ("num_steps", "value", "warm-up of 5"),
    ),
    (
        lambda: constant(1).with_warmup(0.95).plan(STEP, num_rounds=5),
        ("num_rounds", "value", "warm-up of 5"),
    ),
    (lambda: power_decay(0), ("gamma0", "value")),
    (lambda: power_decay(INF), ("gamma0", "not_finite")),
    (lambda: power_decay(1, 0.5), ("alpha", "value")),
    (lambda: power_decay(1, 1.0), ("alpha", "value")),
    (lambda: power_decay(1, NAN, allow_outside_theory=True), ("alpha", "not_finite")),
    (lambda: constant_step(-1.0), ("gamma", "value")),
    (lambda: custom_step([0.1, 0.0]), ("sequence[1]", "value")),
    (lambda: custom_step([0.1, INF]), ("sequence[1]", "not_finite")),
    (lambda: constant(1).plan(custom_step([1.0]), num_rounds=2), ("step sequence", "value")),
    (lambda: Plan.from_arrays([1, 2], [0.1]), ("eta", "shape", "2 rounds", "1 rounds")),
    (lambda: Plan.from_arrays([1, -2], [0.1, 0.1]), ("E[1]", "value")),
    (lambda: Plan.from_arrays([1, 2], [0.1, NAN]), ("eta[1]", "not_finite")),
    (lambda: constant(1).plan(STEP, num_rounds=3).prefix(4), ("num_rounds", "value")),
    (
        lambda: power(9.0, allow_outside_theory=True).plan(STEP, num_rounds=20),
        ("E[10]", "value", "2147483647"),
    ),
]


@pytest.mark.parametrize(("call", "why"), REFUSED, ids=range(len(REFUSED)))
def test_bad_input_is_refused(call, why):
    with refused(*why):
        call()


@pytest.mark.parametrize("name", PAPER_SCHEDULES)
def test_a_schedule_is_the_same_computed_in_parts_of_any_size(name: str, monkeypatch) -> None:
    whole = paper(name).with_warmup(0.05).plan(STEP, num_steps=5_000)
    E = paper(name).intervals(2_000)
    monkeypatch.setattr(families, "CHUNK", 7)
    parts = paper(name).with_warmup(0.05).plan(STEP, num_steps=5_000)
    assert np.array_equal(parts.E, whole.E)
    assert np.array_equal(parts.eta, whole.eta)
    assert np.array_equal(paper(name).intervals(2_000), E)


def test_a_long_plan_computes_no_more_rounds_than_it_has(monkeypatch) -> None:
    asked: list[int] = []
    honest = families.Schedule._chunk

    def counting(self, first: int, stop: int):
        asked.append(stop - first)
        return honest(self, first, stop)

    monkeypatch.setattr(families.Schedule, "_chunk", counting)
    made = power(1 / 2).plan(STEP, num_steps=10**8)
    assert made.num_steps == 10**8
    assert sum(asked) < made.num_rounds + families.CHUNK
    asked.clear()
    with refused("num_steps", "value", "20000000"):
        constant(1).plan(STEP, num_steps=10**8)
    assert asked == []  # refused before anything is computed


@pytest.mark.parametrize("schedule", [power(1 / 2), logarithmic(), constant(3).with_warmup(0.5)])
def test_a_plan_has_as_many_rounds_as_it_may_and_not_one_more(schedule, monkeypatch) -> None:
    monkeypatch.setattr(families, "MOST_ROUNDS", 100)
    most = schedule.plan(STEP, num_rounds=100).num_steps
    steps = next(n for n in range(most + 5, 0, -1) if _rounds(schedule, n))
    assert _rounds(schedule, steps) <= 100
    assert not _rounds(schedule, steps + 1)


def _rounds(schedule, num_steps: int) -> int:
    """How many rounds a plan has; 0 if it is refused as too long."""
    try:
        return schedule.plan(STEP, num_steps=num_steps).num_rounds
    except ValueError as error:
        if "num_steps: must be reached in at most 100 rounds" not in str(error):
            raise
        return 0
