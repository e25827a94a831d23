"""The targets of `jaxlsgd reproduce`, and the numbers that the paper prints; imports no JAX, for the command line."""

from __future__ import annotations

import csv
import functools
import math
from pathlib import Path
from typing import NamedTuple

TABLES = ("table1", "table2", "table3", "table4")
FIGURES = ("figure1", "figure2", "figure3")
TARGETS = (*TABLES, *FIGURES)
# What is made from the rows of a study: the kinds of problems that it shows.
PROBLEMS = {
    "table3": ("paper-linear",),
    "table4": ("paper-logistic",),
    "figure1": ("paper-linear", "paper-logistic"),
    "figure2": ("paper-linear",),
    "figure3": ("paper-logistic",),
}


def title(target: str) -> str:
    """Return a target as the paper calls it.

    >>> title("table3")
    'Table 3'
    """
    return f"{target[:-1].capitalize()} {target[-1]}"


TITLE = "Statistical Estimation and Inference via Local SGD in Federated Learning"
RUNS = 1_000  # behind every number of Tables 3 and 4
PATHS = 50_000  # behind every number of Table 2
HORIZONS = (5_000, 10_000, 20_000, 40_000)
# The paper's methods by their name in the study, as the printed tables have them.
METHODS = {"plug_in": "plug_in", "random_scaling[paper]": "random_scaling"}


class Printed(NamedTuple):
    """A printed number, the number in parentheses behind it, and its standard error."""

    value: float
    in_parentheses: float
    standard_error: float


Key = tuple[str, str, str, int]  # method, measure, schedule, t_T


@functools.cache
def study_table(name: str) -> dict[Key, Printed]:
    """Return Table 3 ("table3", linear) or 4 ("table4", logistic) by method, measure, schedule, t_T."""
    found = {}
    with Path(__file__).with_name(f"{name}.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            key = (row["method"], row["measure"], row["schedule"], int(row["num_steps"]))
            value, behind = float(row["value"]) / 100, float(row["in_parentheses"]) / 100
            # In parentheses: the standard error of a coverage, the standard deviation of a length.
            error = behind if row["measure"] == "coverage" else behind / math.sqrt(RUNS)
            found[key] = Printed(value, behind, error)
    return found
