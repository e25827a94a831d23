"""Statistical estimation and inference with Local SGD in federated learning, in JAX.

The names below are the library. They are loaded on first use, so that `jaxlsgd --help` and the
reading of results do not wait for JAX.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxlsgd.core.lazy import attach

__version__ = "0.2.0"

_WHERE = {
    # contracts
    "Accumulator": "jaxlsgd.core.estimator",
    "Anchored": "jaxlsgd.core.estimator",
    "Algorithm": "jaxlsgd.core.algorithm",
    "Draws": "jaxlsgd.core.problem",
    "Estimator": "jaxlsgd.core.estimator",
    "Interval": "jaxlsgd.core.estimator",
    "JointLaw": "jaxlsgd.core.estimator",
    "Law": "jaxlsgd.core.estimator",
    "Measurement": "jaxlsgd.core.estimator",
    "Moment": "jaxlsgd.core.problem",
    "OuterProduct": "jaxlsgd.core.forms",
    "Participation": "jaxlsgd.core.algorithm",
    "Problem": "jaxlsgd.core.problem",
    "Scaled": "jaxlsgd.core.forms",
    "Sync": "jaxlsgd.core.estimator",
    "flatten": "jaxlsgd.core.problem",
    # what runs
    "CellRows": "jaxlsgd.core.rows",
    "Fit": "jaxlsgd.runs.fit",
    "MethodRows": "jaxlsgd.core.rows",
    "Plan": "jaxlsgd.schedules",
    "Study": "jaxlsgd.study",
    "TableFit": "jaxlsgd.regression.result",
    "fit": "jaxlsgd.runs.fit",
    "fit_table": "jaxlsgd.regression.fit_table",
    "load_cell": "jaxlsgd.core.cell_file",
    "numbers_sent": "jaxlsgd.engine.cost",
    "one_step": "jaxlsgd.inference.one_step",
    "plug_in": "jaxlsgd.inference.plug_in",
    "prepare": "jaxlsgd.engine.machine",
    "random_scaling": "jaxlsgd.inference.random_scaling",
    "register": "jaxlsgd.core.registry",
    "simulate": "jaxlsgd.runs.simulate",
    "track": "jaxlsgd.inference.tracking",
    # rooms
    "algorithms": "jaxlsgd.algorithms:",
    "analysis": "jaxlsgd.analysis:",
    "federation": "jaxlsgd.federation:",
    "inference": "jaxlsgd.inference:",
    "Until": "jaxlsgd.core.rows",
    "looks": "jaxlsgd.analysis.looks:",
    "measures": "jaxlsgd.analysis.measures:",
    "problems": "jaxlsgd.problems:",
    "regression": "jaxlsgd.regression:",
    "report": "jaxlsgd.report:",
    "schedules": "jaxlsgd.schedules:",
    "study": "jaxlsgd.study:",
    "typing": "jaxlsgd.typing:",
}
__getattr__, __dir__ = attach(__name__, _WHERE)
__all__ = ["__version__", *_WHERE]

if TYPE_CHECKING:
    from jaxlsgd import (
        algorithms,
        analysis,
        federation,
        inference,
        problems,
        regression,
        report,
        schedules,
        study,
        typing,
    )
    from jaxlsgd.analysis import measures
    from jaxlsgd.core.algorithm import Algorithm, Participation
    from jaxlsgd.core.cell_file import load_cell
    from jaxlsgd.core.estimator import (
        Accumulator,
        Anchored,
        Estimator,
        Interval,
        JointLaw,
        Law,
        Measurement,
        Sync,
    )
    from jaxlsgd.core.forms import OuterProduct, Scaled
    from jaxlsgd.core.problem import Draws, Moment, Problem, flatten
    from jaxlsgd.core.registry import register
    from jaxlsgd.core.rows import CellRows, MethodRows
    from jaxlsgd.engine.cost import numbers_sent
    from jaxlsgd.engine.machine import prepare
    from jaxlsgd.inference.one_step import one_step
    from jaxlsgd.inference.plug_in import plug_in
    from jaxlsgd.inference.random_scaling import random_scaling
    from jaxlsgd.inference.tracking import track
    from jaxlsgd.regression.fit_table import fit_table
    from jaxlsgd.regression.result import TableFit
    from jaxlsgd.runs.fit import Fit, fit
    from jaxlsgd.runs.simulate import simulate
    from jaxlsgd.schedules import Plan
    from jaxlsgd.study import Study
