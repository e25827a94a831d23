"""Regression on tables whose rows belong to clients. Start reading in `fit_table`.

A `design` reads rows, `standardise` and `pilot` choose coordinates and steps, `in_memory` or `stream` runs. `text`
prints the result of `fit_table`; that of `jaxlsgd.fit` is printed in `runs.fit`.
"""

from jaxlsgd.regression.fit_table import fit_table
from jaxlsgd.regression.result import Coefficients, Communication, TableFit

__all__ = ["Coefficients", "Communication", "TableFit", "fit_table"]
