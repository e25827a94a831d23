"""The verb critical-value."""

from __future__ import annotations

import argparse
import sys

from jaxlsgd.cli._common import Verbs, add_several, add_verb, conflict, positive, share
from jaxlsgd.core import checks
from jaxlsgd.core.checks import refusal
from jaxlsgd.core.display import fraction

VERBS = ("critical-value",)
_MOST_STEPS = 10**7


def add_verbs(verbs: Verbs) -> None:
    """Declare the verb."""
    text = (
        "print the exact critical value of random scaling\n\n"
        "Either of the limit under E_m ~ m^beta, or of a schedule as it is actually run; with a\n"
        "warm-up, the two differ considerably."
    )
    examples = (
        "jaxlsgd critical-value --beta 0.5\n"
        "jaxlsgd critical-value --beta 1/3 --levels 0.9 0.95 0.99\n"
        'jaxlsgd critical-value --schedule "P(1/2)" --num-steps 5000 --warmup 0.05'
    )
    parser = add_verb(verbs, "critical-value", critical_value, text, examples)
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--beta", help="growth exponent of E_m in [0, 1): 0, 0.5, 1/3")
    way.add_argument("--schedule", help="C1, C5, Log, P(1/3) or P(1/2), as actually run")
    add_several(parser, "levels", type=share, metavar="LEVEL", help="default: 0.95")
    parser.add_argument("--num-steps", type=positive, help="t_T, with --schedule")
    parser.add_argument("--warmup", type=float, help="share of the observations, with --schedule")


def critical_value(arguments: argparse.Namespace) -> int:
    """Print one value per level."""
    levels = arguments.levels or [0.95]
    for option in ("num_steps", "warmup"):
        if arguments.schedule is None and getattr(arguments, option) is not None:
            raise conflict(f"--{option.replace('_', '-')}", "be given only with --schedule")
    if arguments.schedule is None and arguments.beta is None:
        shown = " ".join(f"{level:g}" for level in levels)
        sys.stderr.write(f"jaxlsgd: for --beta 0 (constant E_m), --levels {shown}\n")
    for level in levels:
        value = _value(arguments, level)
        print(f"{level:g} {value:.4f}" if len(levels) > 1 else f"{value:.4f}")
    return 0


def _value(arguments: argparse.Namespace, level: float) -> float:
    from jaxlsgd.inference.laws import critical_values

    if arguments.schedule is None:
        return critical_values.critical_value(
            level, beta=_beta("0" if arguments.beta is None else arguments.beta)
        )
    if arguments.num_steps is None:
        raise conflict("--num-steps", "be given with --schedule")
    from jaxlsgd import schedules

    checks.count("--num-steps", arguments.num_steps, 1, _MOST_STEPS)
    schedule = schedules.paper(arguments.schedule).with_warmup(arguments.warmup or 0.0)
    step = schedules.power_decay(0.5)  # any step size gives the same value
    plan = schedule.plan(step, num_steps=arguments.num_steps)
    return critical_values.for_plan(plan, level)


def _beta(text: str) -> float:
    try:
        return float(fraction(text))
    except ValueError:
        raise refusal("--beta", "be a number such as 0.5 or 1/3", text) from None
