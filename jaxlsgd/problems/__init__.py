"""Data-generating processes, one file each; `solve` finds the truth of any problem.

Start with `linear`. What synthetic problems share is in `_common`, their exact optima in `_moments`.
"""

from jaxlsgd.problems.dataset import dataset
from jaxlsgd.problems.drifting import drifting
from jaxlsgd.problems.instrumental import instrumental
from jaxlsgd.problems.linear import linear
from jaxlsgd.problems.logistic import logistic
from jaxlsgd.problems.minibatch import minibatch
from jaxlsgd.problems.multinomial import multinomial
from jaxlsgd.problems.paper import paper_linear, paper_logistic, paper_problem
from jaxlsgd.problems.regression import regression
from jaxlsgd.problems.solution import Solution, solve

__all__ = [
    "Solution",
    "dataset",
    "drifting",
    "instrumental",
    "linear",
    "logistic",
    "minibatch",
    "multinomial",
    "paper_linear",
    "paper_logistic",
    "paper_problem",
    "regression",
    "solve",
]
