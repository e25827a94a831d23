"""What methods cost beyond the run, in the description of each and below every table."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from pathlib import Path

import pytest
from report_helpers import fake_cell as cell

from jaxlsgd import measures, one_step, plug_in, random_scaling
from jaxlsgd.core import cell_file
from jaxlsgd.core.cell_file import about_from_json, about_to_json
from jaxlsgd.report import tables

COSTS = {
    "plug_in": one_step(gradients="increments").cost,
    "random_scaling[paper]": random_scaling().cost,
}


def priced():
    plain = cell()
    assert set(plain.methods) >= set(COSTS)
    return dataclasses.replace(plain, costs=COSTS)


def test_a_table_for_a_paper_has_no_costs():
    assert "Hessians" not in tables.render(priced(), "latex")


@pytest.mark.parametrize("format", ["text", "markdown"])
def test_tables_for_people_say_what_methods_cost(format: str):
    text = tables.render(priced(), format)
    for name in ("30 Hessians per client and run", "no gradients, no communication"):
        assert name in text
    assert "Cost of" not in tables.render(cell(), format), "of rows that do not tell"
    assert format != "text" or max(map(len, text.splitlines())) <= 100


def test_a_long_cost_is_wrapped_and_methods_of_equal_cost_share_a_line():
    long = "gradients, " * 20 + "and memory"
    costs = dict.fromkeys(COSTS, long)
    notes = str(measures.coverage_table(dataclasses.replace(cell(), costs=costs))).split("\n\n")[1]
    assert notes.count("Cost of") == 1 and "plug_in, random_scaling[paper]: gradients" in notes
    assert len(notes.splitlines()) > 2 and max(map(len, notes.splitlines())) <= 100


def test_programs_get_a_column():
    records = csv.DictReader(io.StringIO(tables.render(priced(), "csv")))
    found = {row["method"]: row["cost"] for row in records}
    assert found == COSTS | {name: "" for name in found if name not in COSTS}
    assert {row["cost"] for row in json.loads(tables.render(cell(), "json"))} == {""}


def test_costs_are_kept_with_the_rows(tmp_path: Path):
    path = priced().save(tmp_path / "cell.npz")
    assert cell_file.load_cell(path).costs == COSTS
    about, methods = json.loads(json.dumps(about_to_json(priced()))), list(priced().methods)
    assert about_from_json(about, methods).costs == COSTS
    for wrong in ({"nobody": "much"}, {"plug_in": 3}, {"plug_in": "\x1b[31m"}, []):
        with pytest.raises(cell_file.Unfit):
            about_from_json(about | {"costs": wrong}, methods)


def test_every_method_tells():
    for method in (
        *(
            one_step(),
            one_step(center="average"),
            one_step(gradients="increments", hessians=3),
        ),
        *(plug_in(), plug_in("finite"), plug_in(average="observations")),
        *(random_scaling(), random_scaling(mode="diagonal"), random_scaling("finite")),
        random_scaling(contrasts=[[1.0, 0.0]]),
    ):
        assert "memory" in method.cost, method.name
