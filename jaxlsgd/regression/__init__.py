"""Regression on tables whose rows belong to clients."""

from jaxlsgd.regression.fit_table import fit_table
from jaxlsgd.regression.result import Coefficients, Communication, TableFit

__all__ = ["Coefficients", "Communication", "TableFit", "fit_table"]
