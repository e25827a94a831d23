"""Interval methods, one file each: this project's and the paper's here, other people's in `rivals`.

`joint` has tests and sets for several coordinates, `laws` the distributions. Start reading at `plug_in`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxlsgd.core.lazy import attach

_WHERE = {
    "NORMAL": "jaxlsgd.inference.laws.standard",
    "bootstrap": "jaxlsgd.inference.rivals.bootstrap",
    "critical_values": "jaxlsgd.inference.laws.critical_values:",
    "equal_batches": "jaxlsgd.inference.rivals.equal_batches",
    "federation_tree": "jaxlsgd.inference.rivals.federation_tree",
    "finite_horizon": "jaxlsgd.inference.finite_horizon:",
    "growing_batches": "jaxlsgd.inference.rivals.growing_batches",
    "higrad": "jaxlsgd.inference.rivals.higrad",
    "hulc": "jaxlsgd.inference.rivals.hulc",
    "joint": "jaxlsgd.inference.joint:",
    "laws": "jaxlsgd.inference.laws:",
    "one_step": "jaxlsgd.inference.one_step",
    "oracle": "jaxlsgd.inference.oracle",
    "parallel_runs": "jaxlsgd.inference.rivals.parallel_runs",
    "plug_in": "jaxlsgd.inference.plug_in",
    "random_scaling": "jaxlsgd.inference.random_scaling",
}
__getattr__, __dir__ = attach(__name__, _WHERE)
__all__ = [*_WHERE]

if TYPE_CHECKING:
    from jaxlsgd.inference import finite_horizon, joint, laws
    from jaxlsgd.inference.laws import critical_values
    from jaxlsgd.inference.laws.standard import NORMAL
    from jaxlsgd.inference.one_step import one_step
    from jaxlsgd.inference.oracle import oracle
    from jaxlsgd.inference.plug_in import plug_in
    from jaxlsgd.inference.random_scaling import random_scaling
    from jaxlsgd.inference.rivals.bootstrap import bootstrap
    from jaxlsgd.inference.rivals.equal_batches import equal_batches
    from jaxlsgd.inference.rivals.federation_tree import federation_tree
    from jaxlsgd.inference.rivals.growing_batches import growing_batches
    from jaxlsgd.inference.rivals.higrad import higrad
    from jaxlsgd.inference.rivals.hulc import hulc
    from jaxlsgd.inference.rivals.parallel_runs import parallel_runs
