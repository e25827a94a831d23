"""The arguments of `jaxlsgd reproduce`, without the modules that do it."""

from __future__ import annotations

import argparse
from pathlib import Path

from jaxlsgd.cli._common import add_other_code, positive
from jaxlsgd.report.paper.numbers import HORIZONS
from jaxlsgd.report.paper.targets import TARGETS

_LARGEST_SEED = 2**32 - 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `jaxlsgd reproduce` to a parser."""
    parser.add_argument("target", choices=(*TARGETS, "all"), help="what to reproduce")
    parser.add_argument(
        "--replications",
        type=_several,
        default=1_000,
        metavar="N",
        help="runs per cell (paper: 1000)",
    )
    parser.add_argument(
        "--horizons",
        type=_several,
        nargs="+",
        default=HORIZONS,
        metavar="STEPS",
        help="observations per client t_T; figures use at most the largest (default: the paper's)",
    )
    parser.add_argument("--seed", type=_seed, default=0, help="seed of all draws (default 0)")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("reproduction"),
        metavar="DIR",
        help="where to write (default: reproduction)",
    )
    add_other_code(parser)
    parser.add_argument(
        "--quiet", action="store_true", help="print no progress and no counts of tiles"
    )


def _several(text: str) -> int:
    if (value := positive(text)) < 2:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 2, got {text!r}")
    return value


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) > _LARGEST_SEED:
        rule = f"must be an integer from 0 to {_LARGEST_SEED}"
        raise argparse.ArgumentTypeError(f"{rule}, got {text!r}")
    return int(text)
