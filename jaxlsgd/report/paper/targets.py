"""What can be reproduced of the paper; imports nothing, so that the command line starts quickly."""

from __future__ import annotations

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
    """A target as the paper calls it.

    >>> title("table3")
    'Table 3'
    """
    return f"{target[:-1].capitalize()} {target[-1]}"
