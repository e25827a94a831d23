"""Communication schedules (`families`), step sizes, and the `Plan` made of both for a finite horizon.

Start with `families`; `assumptions` checks a plan against the assumptions of the paper.
"""

from jaxlsgd.schedules.families import (
    FAMILIES,
    PAPER_SCHEDULES,
    Schedule,
    constant,
    custom,
    iterated_logarithmic,
    logarithmic,
    paper,
    power,
)
from jaxlsgd.schedules.plan import Plan
from jaxlsgd.schedules.step_size import StepSize, constant_step, custom_step, power_decay

__all__ = [
    "FAMILIES",
    "PAPER_SCHEDULES",
    "Plan",
    "Schedule",
    "StepSize",
    "constant",
    "constant_step",
    "custom",
    "custom_step",
    "iterated_logarithmic",
    "logarithmic",
    "paper",
    "power",
    "power_decay",
]
