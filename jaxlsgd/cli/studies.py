"""Verbs that make or run a study: init, kinds, plan, run, reproduce.

Modules that import JAX are imported by the functions that need them, so that `--help` does not wait for it.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import dataclasses
import os
import signal
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxlsgd.cli._common import (
    Verbs,
    add_import,
    add_other_code,
    add_verb,
    command,
    integer,
    load_imports,
    positive,
    seconds,
    share,
)
from jaxlsgd.core.checks import Refusal, argument_and_code, refusal
from jaxlsgd.core.display import plural
from jaxlsgd.core.storage import check_output
from jaxlsgd.report.paper.printed import HORIZONS, TARGETS

if TYPE_CHECKING:
    from jaxlsgd.core.registry import Role
    from jaxlsgd.study.array import ArrayPart
    from jaxlsgd.study.forecast import Times
    from jaxlsgd.study.progress import Stop
    from jaxlsgd.study.runner import Outcome
    from jaxlsgd.study.study import Study

VERBS = ("init", "kinds", "plan", "run", "collect", "reproduce")
_HOW_TO_NAME = """
In a study file, give a name alone, or a table with arguments:
  problems = ["paper-linear", {kind = "linear", dim = 5, num_clients = 10, gamma0 = 0.5}]
  schedules = ["C5", {family = "power", beta = "1/4"}]"""
# As a study file has them, each with its usual kinds first; the others follow.
_KINDS_IN_ORDER: dict[Role, tuple[str, ...]] = {
    "problem": (
        *("linear", "logistic", "regression", "multinomial", "instrumental", "drifting"),
        *("paper-linear", "paper-logistic", "minibatch"),
    ),
    "schedule": ("constant", "power", "logarithmic", "iterated_logarithmic", "custom"),
    "method": ("one_step", "plug_in", "random_scaling"),
    "algorithm": ("local_sgd", "participation", "client_dropout", "stragglers", "fedprox"),
}
# Ctrl-C, the end of a batch job, a closed terminal, and SLURM's optional warning before the end.
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_TEMPLATES = {False: "template.toml", True: "paper.toml"}


def add_verbs(verbs: Verbs) -> None:
    """Declare the verbs."""
    _add_init(verbs)
    _add_kinds(verbs)
    _add_plan(verbs)
    _add_run(verbs)
    _add_collect(verbs)
    _add_reproduce(verbs)


def _add_init(verbs: Verbs) -> None:
    text = "write a commented study file to edit\n\nAn existing file is never overwritten."
    examples = "jaxlsgd init study.toml\njaxlsgd init --paper paper.toml"
    parser = add_verb(verbs, "init", init, text, examples)
    parser.add_argument("path", nargs="?", default="study.toml", help="default: study.toml")
    parser.add_argument(
        "--paper", action="store_true", help="write the paper's own experiments instead"
    )


def init(arguments: argparse.Namespace) -> int:
    """Write a study file to start from."""
    import jaxlsgd.study

    folder, path = Path(jaxlsgd.study.__file__).parent, Path(arguments.path)
    check_output(path)
    content = (folder / _TEMPLATES[arguments.paper]).read_text(encoding="utf-8")
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(content)
    except FileExistsError:
        text = f"{path} already exists; choose another name"
        raise Refusal(text, str(path), "exists") from None
    print(f"wrote {path}; next: {command()} plan {path}")
    return 0


def _add_kinds(verbs: Verbs) -> None:
    text = (
        "list the problems, methods, algorithms and schedules that a study file can name\n\n"
        "Each comes with the arguments of its builder. To add kinds of your own, register them with\n"
        "@jaxlsgd.register in a Python file, and load it with --import."
    )
    parser = add_verb(verbs, "kinds", kinds, text, "jaxlsgd kinds\njaxlsgd kinds --import mine.py")
    add_import(parser)


def kinds(arguments: argparse.Namespace) -> int:
    """Print what a study file can name."""
    load_imports(arguments)
    from jaxlsgd.core import registry
    from jaxlsgd.study import imports  # noqa: F401  registers the kinds of the package

    for role, first in _KINDS_IN_ORDER.items():
        print(f"{role}s")
        known = registry.kinds(role)
        for kind in (known[name] for name in dict.fromkeys((*first, *known))):
            print(f"  {kind.name}: {kind.summary}")
            if takes := kind.signature():
                print(textwrap.indent(textwrap.fill(takes, 94), " " * 6))
    print(_HOW_TO_NAME)
    return 0


def _add_plan(verbs: Verbs) -> None:
    text = (
        "estimate what a study will cost before it runs\n\n"
        "Prints cells, tiles, compiled programs, memory, time and the Monte-Carlo standard error of\n"
        "a coverage. The time is measured: a few steps of the study are run, and the programs that are\n"
        "compiled for them are kept for it. Besides compiling the first, that takes at most 10 s or a\n"
        "tenth of the forecast; --thorough takes its time. With --rate nothing is run. Writes no results."
    )
    examples = "jaxlsgd plan study.toml\njaxlsgd plan study.toml --mcse 0.002 --rate 30000000"
    parser = add_verb(verbs, "plan", plan, text, examples)
    parser.add_argument("study", help="study file (TOML)")
    parser.add_argument(
        "--mcse", type=share, help="how many replications this standard error needs"
    )
    parser.add_argument(
        "--devices", type=positive, help="number of devices to plan for (default: cores here)"
    )
    parser.add_argument(
        "--rate",
        type=positive,
        help="client-steps per second per device, instead of measuring them",
    )
    parser.add_argument(
        "--thorough", action="store_true", help="measure every kind of program, whatever it takes"
    )
    add_import(parser)


def plan(arguments: argparse.Namespace) -> int:
    """Print a forecast of what a study costs."""
    import jax

    from jaxlsgd.engine import machine

    machine.prepare()  # before anything can create an array
    load_imports(arguments)
    from jaxlsgd.study import forecast, jobs
    from jaxlsgd.study.study import Study

    study = Study.from_toml(arguments.study)
    with _naming(arguments.study):
        if arguments.mcse is not None:
            forecast.replications_for(0.95, arguments.mcse)  # refuse it before anything is measured
        devices = arguments.devices or len(jax.local_devices())
        times, how = _times(study, arguments.rate, devices, arguments.thorough)
        lines = list(_plan_lines(study, times, how, devices, arguments.mcse))
    print("\n".join(f"{name:<24}{value}" for name, value in lines))
    if warning := jobs.without_truth(study):
        sys.stderr.write(f"jaxlsgd: warning: {warning}\n")
    return 0


@contextlib.contextmanager
def _naming(path: str) -> Iterator[None]:
    """Add the name of the study file to refusals."""
    from jaxlsgd.study.executors.dask import ClusterError

    try:
        yield
    except ClusterError:
        raise
    except ValueError as error:
        raise Refusal(f"{path}: {error}", *argument_and_code(error)) from error


def _plan_lines(
    study: Study, times: Times | None, how: str, devices: int, error: float | None
) -> Iterator[tuple[str, str]]:
    from jaxlsgd.core.progress import duration
    from jaxlsgd.study import forecast

    found = forecast.forecast(study)
    yield "cells", f"{found.cells:,}"
    yield "replications", f"{study.replications:,} per cell"
    yield "tiles", f"{found.tiles:,} of {study.tile_size} replications each"
    if found.idle_share > 0.1:
        full = study.tiles_per_cell * study.tile_size
        yield "", f"({full:,} replications would take no longer, as every tile runs at full width)"
    yield "compiled programs", f"about {found.programs}"
    yield from _memory_lines(study, devices)
    yield "work", f"{found.work:.3g} client-steps"
    if times is None:
        yield "time", f"not measured: {how}"
    else:
        yield "time", f"about {duration(times.total)} {how}"
        parts = times._asdict().items()
        yield "", ", ".join(f"{name} {seconds:.0f} s" for name, seconds in parts if seconds >= 0.5)
    for level in study.levels:
        got = forecast.standard_error(level, study.replications)
        yield f"MC error at {level:g}", f"{got:.4f} with {study.replications:,} replications"
        if error is not None:
            yield "", f"{error:g} needs {forecast.replications_for(level, error):,} replications"


def _memory_lines(study: Study, devices: int) -> Iterator[tuple[str, str]]:
    """Yield how much memory a study needs, what for, and whether it fits."""
    import jax

    from jaxlsgd.study import forecast

    device = jax.local_devices()[0]
    need, room = forecast.memory(study, devices, device.platform), forecast.Room.of(device)
    has = "" if room.host is None else f"; this machine has {room.host / 1e6:,.0f} MB"
    yield "memory", f"about {need.host / 1e6:,.0f} MB{has}"
    yield "", str(need)
    if lack := room.lacks(need):
        sure = room.lacks(need, slack=forecast.FORECAST_ERROR)
        yield "", f"{'does' if sure else 'may'} not fit: {lack}"
        yield "", forecast.what_fits(study, room, devices, device.platform)


def _times(
    study: Study, rate: int | None, devices: int, thorough: bool
) -> tuple[Times | None, str]:
    """Return the forecast times, or None if a trial does not fit in memory, and where they come from."""
    from jaxlsgd.study import forecast, jobs

    if rate is not None:
        jobs.check(study)
        speed = f"{rate / 1e6:.3g} million client-steps per second per device"
        return forecast.forecast(study).times(rate, devices), f"at {speed} (given)"
    from jaxlsgd.engine import machine

    local = machine.chosen()[:devices]
    need = forecast.memory(study, len(local), local[0].platform)
    if forecast.Room.of(local[0]).lacks(need):
        jobs.check(study)
        return None, "a trial does not fit in memory"
    most = None if thorough else forecast.MOST_SECONDS
    return forecast.measured(study, local, devices, most), f"on {devices} devices (measured)"


def _add_run(verbs: Verbs) -> None:
    text = (
        "run a study, or what is missing of it\n\n"
        "Every finished tile of replications is kept: the same command resumes a study, and more\n"
        "replications in the study file extend it. Ctrl-C, SIGTERM, SIGHUP or SIGUSR1 starts nothing more,\n"
        "says how long the tiles in flight take, finishes them and exits with code 3; a second one drops them\n"
        "and exits at once, with code 130 after Ctrl-C (128 and the number of the signal). If nothing is left\n"
        "to do, the code is 0, whatever came. A directory that holds a different study is refused.\n\n"
        "With --dask, the workers of a cluster compute and this process writes; start a cluster with\n"
        "'dask scheduler' and 'dask worker', or with a package like dask-jobqueue.\n\n"
        "With --part 3/20, only the third of twenty parts runs, in DIR/part-03-of-20, with no communication:\n"
        "for array jobs of any scheduler. 'jaxlsgd collect DIR' makes one study of all parts."
    )
    examples = (
        "jaxlsgd run study.toml --out results\n"
        "jaxlsgd run study.toml --out results --max-time 8h\n"
        "jaxlsgd run study.toml --out results --devices 1 --quiet\n"
        "jaxlsgd run study.toml --out results --import mine.py\n"
        "jaxlsgd run study.toml --out results --dask tcp://scheduler:8786\n"
        "jaxlsgd run study.toml --out results --part $SLURM_ARRAY_TASK_ID/20"
    )
    parser = add_verb(verbs, "run", run, text, examples)
    parser.add_argument("study", help="study file (TOML)")
    parser.add_argument("--out", required=True, metavar="DIR", help="directory for the results")
    parser.add_argument(
        "--max-time",
        type=seconds,
        help="start no tile after this long (90, 15m, 8h); tiles in flight are finished",
    )
    parser.add_argument(
        "--devices", type=positive, help="how many devices, or local workers, to use (default: all)"
    )
    parser.add_argument(
        "--dask",
        metavar="WHERE",
        help="run on Dask workers: a scheduler's address, or 'local' for one process per core",
    )
    parser.add_argument(
        "--part", metavar="I/N", help="run the I-th of N parts, as one job of an array"
    )
    parser.add_argument(
        "--replications",
        type=positive,
        help="use this many, instead of the number in the study file",
    )
    parser.add_argument(
        "--fresh", action="store_true", help="refuse a DIR that already holds a study"
    )
    add_other_code(parser)
    parser.add_argument(
        "--quiet", action="store_true", help="print nothing but warnings and failures"
    )
    add_import(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run a study."""
    _start_jax(arguments)  # before kinds of the user's own or problems can create an array
    load_imports(arguments)
    from jaxlsgd.study.array import ArrayPart
    from jaxlsgd.study.progress import Stop
    from jaxlsgd.study.study import Study

    part = None if arguments.part is None else ArrayPart.of(arguments.part)
    study = Study.from_toml(arguments.study)
    if arguments.replications:
        study = dataclasses.replace(study, replications=arguments.replications)
    stop = Stop(arguments.max_time)
    with _signals(stop), _place(arguments) as place, _naming(arguments.study):
        outcome = study.run(
            arguments.out,
            **place,
            part=part,
            stop=stop,
            progress=not arguments.quiet,
            fresh=arguments.fresh,
            allow_other_code=arguments.allow_other_code,
        )
    _print_outcome(outcome, arguments.out, arguments.quiet, part)
    if outcome.signal:
        atexit.register(_exit_without_threads, outcome.exit_code)
    return outcome.exit_code


def _exit_without_threads(code: int) -> None:
    """End the process at once if a thread still compiles or computes, which nothing can interrupt."""
    from jaxlsgd.study.executors.threads import NAME

    if any(thread.name.startswith(NAME) for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _print_outcome(
    outcome: Outcome, directory: str, quiet: bool, part: ArrayPart | None = None
) -> None:
    """Print how a run ended; with --quiet only if rows are missing."""
    if not quiet or outcome.exit_code:
        print(_outcome(outcome, directory, part))


def _outcome(outcome: Outcome, directory: str, part: ArrayPart | None = None) -> str:
    from jaxlsgd.core.progress import duration

    made = f"{plural(outcome.tiles_run, 'tile')} in {duration(outcome.seconds)}"
    if total := outcome.tally.total():
        made += f"; {total}"
    if outcome.lost:
        gone = plural(len(outcome.lost), "tile")
        which = ", ".join(outcome.lost[:5]) + (", …" if len(outcome.lost) > 5 else "")
        return (
            f"failed: {gone} committed before or by this run are missing from {directory} ({which}); "
            f"run the same command again, which computes them; {made}"
        )
    if outcome.errors:
        cells = plural(len(outcome.errors), "cell")
        return f"failed: {cells}; {made}, all other rows are in {directory}"
    if outcome.tiles_left:
        dropped = ", those in flight were dropped" if outcome.signal else ""
        return f"partial: {made}, {outcome.tiles_left} left{dropped}; the same command resumes"
    if part is not None:
        return f"done: {made}; when all {part.count} parts are: {command()} collect {directory}"
    return f"done: {made}; next: {command()} table {directory}"


def _add_collect(verbs: Verbs) -> None:
    text = (
        "make one study of all parts of an array job\n\n"
        "DIR holds what 'jaxlsgd run --part' wrote, such as part-01-of-20 to part-20-of-20. Every tile is read\n"
        "and checked first. If a part is missing, incomplete or damaged, nothing is written, and the commands\n"
        "that complete it are printed. The rows are the same as those of one run. The parts are kept."
    )
    parser = add_verb(verbs, "collect", collect, text, "jaxlsgd collect results")
    parser.add_argument("directory", metavar="DIR", help="directory with the parts")
    add_other_code(parser)


def collect(arguments: argparse.Namespace) -> int:
    """Make one study of its parts."""
    from jaxlsgd.study.store.collect import collect

    found = collect(arguments.directory, allow_other_code=arguments.allow_other_code)
    for warning in found.warnings:
        sys.stderr.write(f"jaxlsgd: warning: {warning}\n")
    tiles, place = plural(found.tiles, "tile"), arguments.directory
    print(f"collected {tiles} of {plural(found.parts, 'part')}; next: {command()} table {place}")
    return 0


def _start_jax(arguments: argparse.Namespace) -> None:
    """Set up JAX, which reads its settings once, when it creates its first array."""
    import jax

    from jaxlsgd.engine import machine

    if arguments.dask is not None:
        if not os.environ.get("JAX_PLATFORMS"):
            jax.config.update("jax_platforms", "cpu")  # leave a GPU's memory to the workers
        return
    machine.prepare(arguments.devices and min(arguments.devices, machine.most_cpu_devices()))


@contextlib.contextmanager
def _place(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield where to run: on devices of this process, or on a Dask cluster."""
    if arguments.dask is None:
        import jax

        from jaxlsgd.engine import machine

        if jax.default_backend() == "cpu":
            _check_devices(arguments.devices)
        devices = machine.chosen()[: arguments.devices]
        yield {"devices": devices}
        return
    from jaxlsgd.study.executors import dask as cluster

    if arguments.dask == "local":
        _check_devices(arguments.devices)
    with cluster.connected(arguments.dask, arguments.devices) as client:
        yield {"client": client}


def _check_devices(wanted: int | None) -> None:
    """Refuse far more devices than cores: each costs memory, and none is faster."""
    from jaxlsgd.engine import machine

    most = machine.most_cpu_devices()
    if wanted is not None and wanted > most:
        hint = f"; there are {machine.cores()} cores here"
        raise refusal("--devices", f"be at most {most}", wanted, hint)


@contextlib.contextmanager
def _signals(stop: Stop) -> Iterator[None]:
    """Let signals that end a process stop a run in an orderly way."""
    before = {number: signal.signal(number, stop) for number in _ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _add_reproduce(verbs: Verbs) -> None:
    text = (
        "reproduce the paper's tables and figures, next to the printed ones\n\n"
        "Tables 3 and 4 are made from one study, and Figures 1 to 3 from another. Both are kept as\n"
        "ordinary studies in DIR/study-tables and DIR/study-figures: the same command again resumes,\n"
        "more replications extend them, and 'jaxlsgd status' and 'jaxlsgd table' read them. Other\n"
        "horizons or another seed need another DIR. DIR/reproduction.md holds all that was made there."
    )
    examples = "jaxlsgd reproduce all --out paper\njaxlsgd reproduce table4 --replications 200"
    parser = add_verb(verbs, "reproduce", reproduce, text, examples)
    parser.add_argument("target", choices=(*TARGETS, "all"), help="what to reproduce")
    parser.add_argument(
        "--replications",
        type=integer(2),
        default=1_000,
        metavar="N",
        help="runs per cell (paper: 1000)",
    )
    parser.add_argument(
        "--horizons",
        type=integer(2),
        nargs="+",
        default=HORIZONS,
        metavar="STEPS",
        help="observations per client t_T; figures use at most the largest (default: the paper's, "
        f"{' '.join(map(str, HORIZONS))})",
    )
    parser.add_argument(
        "--seed", type=integer(0, 2**32 - 1), default=0, help="seed of all draws (default 0)"
    )
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


def reproduce(arguments: argparse.Namespace) -> int:
    """Reproduce the paper's tables and figures."""
    from jaxlsgd.engine import machine
    from jaxlsgd.report.paper import reproduce as paper
    from jaxlsgd.report.paper.reproduce import Size
    from jaxlsgd.study.progress import Stop

    stop = Stop()  # shared by all studies, so that a signal during one starts no other

    def run_study(study: Study, directory: Path) -> int:
        with _signals(stop):
            outcome = study.run(
                directory,
                stop=stop,
                progress=not arguments.quiet,
                allow_other_code=arguments.allow_other_code,
            )
        _print_outcome(outcome, str(directory), arguments.quiet)
        if outcome.signal:
            atexit.register(_exit_without_threads, outcome.exit_code)
        return outcome.exit_code

    machine.prepare()
    targets = TARGETS if arguments.target == "all" else (arguments.target,)
    size = Size(tuple(arguments.horizons), arguments.replications, arguments.seed)
    return paper.reproduce(targets, arguments.out, size, run_study)
