"""Numbers sent per client: counted by hand, declared by methods and algorithms, shown wherever costs are."""

from __future__ import annotations

import csv
import dataclasses
import functools
import io
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refused
from report_helpers import fake_cell

import jaxlsgd
from jaxlsgd import (
    Algorithm,
    Draws,
    Problem,
    algorithms,
    numbers_sent,
    one_step,
    plug_in,
    problems,
    random_scaling,
    schedules,
)
from jaxlsgd.analysis import measures
from jaxlsgd.core.cell_file import Unfit, about_from_json, about_to_json
from jaxlsgd.core.estimator import BLOCK_STEPS
from jaxlsgd.engine.cost import sent_under_c1
from jaxlsgd.inference import anchored_rounds
from jaxlsgd.inference.rivals.bootstrap import bootstrap, perturbed
from jaxlsgd.inference.rivals.federation_tree import federation_tree, split_clients
from jaxlsgd.inference.rivals.higrad import higrad
from jaxlsgd.report import figures, tables
from jaxlsgd.runs.cell import Cell

STEPS = 5_000
increments = functools.partial(one_step, gradients="increments")


def plan(name: str):
    """The paper's plan: 250 rounds of one step first."""
    return schedules.paper(name).with_warmup(0.05).plan(schedules.power_decay(0.5), num_steps=STEPS)


def flat(dim: int, num_clients: int = 4) -> Problem:
    """A problem of so many parameters that costs nothing to make."""
    return Problem(
        np.zeros(dim),
        lambda x, seen: jnp.sum((x - seen) ** 2),
        num_clients,
        draws=Draws(normal=dim),
        observe=lambda draws, client: draws.normal,
    )


def rounds_by_hand(name: str) -> int:
    """Rounds of C1 and P(1/2): 250 of one step, then ⌈√m⌉ until 5,000 observations are used."""
    if name == "C1":
        return STEPS
    rounds, used, m = 250, 250, 0
    while used < STEPS:
        m += 1
        root = int(m**0.5)
        used += root if root * root == m else root + 1
        rounds += 1
    return rounds


# Under C1 T = 5,000, under P(1/2) T = 611. A model is d, a gradient d, a Hessian d(d + 1)/2: 15 and 5,050 numbers.
# Here one_step is the one from increments, with 30 Hessians in all.
BY_HAND = {
    ("C1", 5): {"": 25_000, "random_scaling": 25_000, "one_step": 25_450, "plug_in": 125_000},
    ("P(1/2)", 5): {"": 3_055, "random_scaling": 3_055, "one_step": 3_505, "plug_in": 15_275},
    ("C1", 100): {
        **{"": 500_000, "random_scaling": 500_000},
        **{"one_step": 651_500, "plug_in": 26_250_000},
    },
    ("P(1/2)", 100): {
        **{"": 61_100, "random_scaling": 61_100},
        **{"one_step": 212_600, "plug_in": 3_207_750},
    },
}


@pytest.mark.parametrize(("name", "dim"), BY_HAND)
def test_counts_are_those_made_by_hand(name: str, dim: int):
    assert plan(name).num_rounds == rounds_by_hand(name) == {"C1": 5_000, "P(1/2)": 611}[name]
    methods = {"": None, "random_scaling": random_scaling(), "one_step": increments()}
    methods["plug_in"] = plug_in()
    problem = flat(dim)
    found = {key: numbers_sent(problem, plan(name), method) for key, method in methods.items()}
    assert found == BY_HAND[name, dim]
    assert sent_under_c1(problem, STEPS) == BY_HAND["C1", dim][""]


@pytest.mark.parametrize(
    ("name", "dim", "clients"), [("C1", 5, 4), ("P(1/2)", 5, 10), ("C1", 30, 1)]
)
def test_anchors_are_counted_by_hand(name: str, dim: int, clients: int):
    """A model per round, a gradient sum once there is an anchor, and two Hessians in some rounds."""
    given, problem = plan(name), flat(dim, clients)
    edge = -(-max(BLOCK_STEPS, 2 * dim) // BLOCK_STEPS) * BLOCK_STEPS
    assert anchored_rounds.first_edge(dim) == edge
    begun = later = used = 0
    for E in given.E.tolist():
        begun += 1
        later += used >= edge
        used += E
    chosen = anchored_rounds.hessian_rounds(given.E, clients, dim)
    hessians = int(np.count_nonzero(chosen))
    assert 0 < hessians < later and chosen[: begun - later].sum() == 0
    expected = begun * dim + later * dim + hessians * dim * (dim + 1)
    for method in (one_step(), one_step(center="average")):
        assert numbers_sent(problem, given, method) == expected


def test_few_rounds_with_hessians_send_more_than_many_without():
    """What a count of rounds hides: at d = 100, P(1/2) has 12 % of the rounds of C1 and sends six times as much."""
    rare, often = plan("P(1/2)"), plan("C1")
    assert rare.num_rounds / often.num_rounds == pytest.approx(0.122, abs=5e-4)
    ratio = numbers_sent(flat(100), rare, plug_in()) / numbers_sent(flat(100), often)
    assert ratio == pytest.approx(6.42, abs=0.01)


def test_methods_declare_what_they_need():
    problem, short = flat(5), plan("P(1/2)")
    model, gradient, hessian, T = 5, 5, 15, 611
    each = {
        random_scaling(mode="diagonal"): model,
        random_scaling(contrasts=np.eye(2, 5)): model,
        random_scaling("finite"): model + gradient + hessian,
        plug_in("finite"): model + gradient + hessian,
        plug_in(average="observations"): model + gradient + hessian,
    }
    for method, numbers in each.items():
        assert numbers_sent(problem, short, method) == T * numbers, method.name
    for count in (0, 10, 30):
        found = numbers_sent(problem, short, increments(hessians=count))
        assert found == T * model + count * hessian


def test_a_part_of_a_run_counts_its_rounds():
    problem, short = flat(5), plan("P(1/2)")
    begun = 30 * int(short.E[:450].sum()) // 5_000
    assert 0 < begun < 30
    assert numbers_sent(problem, short, increments(), rounds=450) == 450 * 5 + begun * 15
    with refused("rounds", "value", "611"):
        numbers_sent(problem, short, rounds=612)


def test_algorithms_declare_what_a_message_has():
    problem, short, T, d = flat(5), plan("P(1/2)"), 611, 5
    # Of each: numbers in a round without a method, and what the sum of gradients of increments adds.
    expected = {
        algorithms.local_sgd(): (d, 0),
        algorithms.server_adam(): (d, 0),
        algorithms.scaffold(): (2 * d, 0),
        algorithms.fedprox(0.1): (d, d),
        algorithms.local_momentum(0.5): (d, d),
        algorithms.stragglers(0.5): (d, d),
        algorithms.client_dropout(0.2): (d, d),
    }
    for algorithm, (alone, total) in expected.items():
        assert numbers_sent(problem, short, None, algorithm) == T * alone, algorithm.name
        found = numbers_sent(problem, short, increments(), algorithm)
        assert found == T * (alone + total) + 30 * 15, algorithm.name


def test_an_algorithm_of_ones_own_is_counted_by_its_message():
    def send(client, round):
        return {"twice": jnp.stack([client.x, client.x]), "loss": round.eta}, client.memory

    own = Algorithm("own", send=send, receive=lambda moved, message, round: (moved, None))
    assert numbers_sent(flat(5), plan("C1"), None, own) == STEPS * (5 + 10 + 1)
    declared = dataclasses.replace(own, sends=lambda dim: 3 * dim)
    assert numbers_sent(flat(5), plan("C1"), None, declared) == STEPS * 15


def test_clients_that_are_not_chosen_send_nothing():
    problem, short = flat(5, num_clients=10), plan("P(1/2)")
    for choice in ("uniform", "weight"):
        some = algorithms.participation(3, choice)
        assert numbers_sent(problem, short, increments(), some) == 3_505 * 3 / 10
    everybody = algorithms.participation(10)
    assert numbers_sent(problem, short, increments(), everybody) == 3_505


def test_copies_are_sent_and_federations_are_not():
    """A bootstrap sends B + 1 models; a client of a federation that has split sends the model of its own."""
    base, short = problems.linear(5, 4, heterogeneity=0.0), plan("P(1/2)")
    copies, tree = perturbed(base, 30), split_clients(base, 4)
    assert numbers_sent(copies, short, bootstrap(30, 5)) == 611 * 31 * 5
    shape = {"branches": (2, 2), "splits": (50, 100)}
    split = numbers_sent(tree, short, higrad(**shape), federation_tree(**shape))
    assert split == 611 * 5
    for problem in (base, copies, tree):
        assert sent_under_c1(problem, STEPS) == STEPS * 5


def test_a_cell_says_what_its_methods_send():
    methods = (increments(name="one_step"), random_scaling())
    rows = Cell(flat(5), plan("P(1/2)"), methods, save_at=(100, 611)).with_rows({})
    assert rows.numbers_sent == {"one_step": (500, 3_505), "random_scaling": (500, 3_055)}
    assert rows.sent_under_c1 == (500, 25_000)


def test_tables_have_the_numbers():
    cell = dataclasses.replace(fake_cell(saves=2), costs={"plug_in": "dear"})
    found = list(csv.DictReader(io.StringIO(tables.render(cell, "csv"))))
    sent = {(row["method"], row["save_round"]): row["numbers_sent"] for row in found}
    assert sent["plug_in", "10"] == "70" and sent["random_scaling[paper]", "100"] == "200"
    assert {row["sent_over_c1"] for row in found} == {"0.35", "0.1"}
    assert json.loads(tables.render(cell, "json"))[-1]["numbers_sent"] == 200
    assert "numbers_sent_mcse" not in found[0]
    text = tables.render(cell, measures=["numbers_sent", "sent_over_c1"])
    assert "numbers sent" in text and "700" in text
    for told in (tables.render(cell), str(measures.coverage_table(cell))):
        line = " ".join(told.split())
        assert "dear; a client sends 0.35 × the numbers of Local SGD under C1." in line


def test_rows_that_do_not_tell_have_none():
    cell = dataclasses.replace(
        fake_cell(), numbers_sent={}, sent_under_c1=(), costs={"plug_in": "?"}
    )
    assert {row["numbers_sent"] for row in measures.summarise(cell)} == {None}
    assert "Cost of plug_in: ?." in tables.render(cell)


def test_numbers_sent_are_kept_with_the_rows(tmp_path):
    cell = fake_cell(saves=2)
    kept = jaxlsgd.load_cell(cell.save(tmp_path / "cell.npz"))
    assert (kept.numbers_sent, kept.sent_under_c1) == (cell.numbers_sent, cell.sent_under_c1)
    about, methods = json.loads(json.dumps(about_to_json(cell))), list(cell.methods)
    right = about["numbers_sent"]
    for wrong in (
        *({}, [], {"plug_in": [70, 700]}, right | {"plug_in": [70]}, right | {"plug_in": 70}),
        *(right | {"plug_in": [70, value]} for value in ("700", -1, True, None, float("inf"))),
    ):
        with pytest.raises(Unfit):
            about_from_json(about | {"numbers_sent": wrong}, methods)
    with pytest.raises(Unfit):
        about_from_json(about | {"sent_under_c1": []}, methods)


def test_the_trade_off_is_drawn_against_numbers_sent(tmp_path):
    cells = [fake_cell(name, num_steps=100 * steps) for name, steps in (("C1", 1), ("C5", 5))]
    text = figures.save_for_print(cells, tmp_path, "tradeoff", format="svg").read_text()
    assert "Numbers sent / Local SGD's under C1" in text
    silent = [dataclasses.replace(cell, numbers_sent={}, sent_under_c1=()) for cell in cells]
    with refused("figure", "unsupported"):
        figures.save_for_print(silent, tmp_path, "tradeoff")


def test_stored_results_count_as_this_does():
    """What the README's figure is drawn from, and the leaderboard's cost."""
    results = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
    with (results / "stress.csv").open(newline="") as stream:
        rows = {(row["cell"], row["method"]): row for row in csv.DictReader(stream)}
    for name in ("C1", "P(1/2)"):
        anchored = numbers_sent(flat(5, 10), plan(name), one_step())
        for method, sent in (("one_step", anchored), ("plug_in", BY_HAND[name, 5]["plug_in"])):
            row = rows[f"linear paper, {name}, 5,000", method]
            assert int(row["numbers_sent"]) == sent
            assert float(row["sent_over_c1"]) == sent / 25_000
    with (results / "leaderboard.csv").open(newline="") as stream:
        board = list(csv.DictReader(stream))
    sent = {
        row["algorithm"]: float(row["sent_over_c1"])
        for row in board
        if (row["schedule"], row["method"], row["problem"], row["num_steps"])
        == ("C1", "one_step", "logistic", "5000")
    }
    # SCAFFOLD sends a control beside the model; half of the clients take part in 5 of 10, and need more Hessians.
    usual = numbers_sent(flat(5, 10), plan("C1"), one_step()) / 25_000
    assert sent["local_sgd"] == sent["local Adam"] == sent["clipping"] == usual
    assert sent["scaffold"] == usual + 1
    halved = numbers_sent(flat(5, 10), plan("C1"), one_step(), algorithms.participation(5)) / 25_000
    assert usual / 2 < sent["5 of 10 clients"] == halved < usual
