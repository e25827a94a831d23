"""Types in the signatures of this package, for annotations of your own.

The contracts themselves (`Problem`, `Algorithm`, `Estimator`, `Plan`, `CellRows`, …) are names of the package.
"""

from jaxlsgd.core.algorithm import Client, Round
from jaxlsgd.core.checks import Dtype
from jaxlsgd.core.estimator import Side
from jaxlsgd.core.problem import Array, ClientNumbers, Observation, Params
from jaxlsgd.core.progress import Progress
from jaxlsgd.inference.tracking import Rows
from jaxlsgd.runs.simulate import Device

__all__ = [
    "Array",
    "Client",
    "ClientNumbers",
    "Device",
    "Dtype",
    "Observation",
    "Params",
    "Progress",
    "Round",
    "Rows",
    "Side",
]
