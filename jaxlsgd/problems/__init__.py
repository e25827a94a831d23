"""Data-generating processes: where the clients' observations come from. One file each."""

from jaxlsgd.problems.dataset import dataset
from jaxlsgd.problems.linear import linear
from jaxlsgd.problems.logistic import logistic
from jaxlsgd.problems.paper import paper_linear, paper_logistic, paper_problem
from jaxlsgd.problems.solution import Solution, solve

__all__ = [
    "Solution",
    "dataset",
    "linear",
    "logistic",
    "paper_linear",
    "paper_logistic",
    "paper_problem",
    "solve",
]
