"""Types in the signatures of this package, for annotations of your own.

The contracts themselves (`Problem`, `Algorithm`, `Estimator`, `Plan`, `CellRows`, …) are names of the package.
"""

from jaxlsgd.core.problem import Array, Client, Observation, Params
from jaxlsgd.core.progress import Progress
from jaxlsgd.runs.simulate import Device

__all__ = ["Array", "Client", "Device", "Observation", "Params", "Progress"]
