"""Data-generating processes: where the clients' observations come from."""

from jaxlsgd.problems.dataset import dataset
from jaxlsgd.problems.linear import linear
from jaxlsgd.problems.logistic import logistic
from jaxlsgd.problems.paper import PAPER_STEP, paper_problem

__all__ = ["PAPER_STEP", "dataset", "linear", "logistic", "paper_problem"]
