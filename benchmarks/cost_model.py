"""A model, on paper, of the time and memory of sizes that cannot be run here.

A local step of R replications launches a fixed number of kernels, moves bytes and does operations:

    seconds per step = kernels · launch  +  max(bytes / bandwidth, operations / rate)

Cells that run as lanes share the kernels of a step and its draws. With clients on several devices a round adds one sum over them. The form of the model is fitted to this
machine's processor and tried on sizes that the fit has not seen; for the H100 its numbers come from the
compiled programs (kernels, bytes), from counting (operations) and from data sheets (the rest). Nothing about
an H100 was measured.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from benchmarks import cases
from benchmarks.timing import Finding, finding, interleaved, medians

FITTED, TRIED = (32, 64, 128, 512), (96, 256, 384)  # replications
STEPS = 2_048


class Device(NamedTuple):
    """One accelerator, and how it is joined to others."""

    name: str
    memory: float  # bytes
    bandwidth: float  # bytes per second of its memory
    rate: float  # 32-bit integer operations per second
    launch: float  # seconds per kernel, in a stream that is never empty
    link: float  # bytes per second to the other devices
    latency: float  # seconds of a sum over all devices, however small


# NVIDIA's data sheet of the H100 SXM: 80 GB, 3.35 TB/s, 132 processors at 1.98 GHz, each with 64 units for
# integers. (The 67 TFLOP/s in float32 are of 128 units, and count a multiplication and an addition as two.) Launch,
# link (400 Gbit/s per device) and latency are the usual orders of magnitude; half of the peak is what such
# kernels reach.
INTEGERS = 132 * 64 * 1.98e9
H100 = Device("H100", 80e9, 0.5 * 3.35e12, 0.5 * INTEGERS, 2.5e-6, 0.5 * 50e9, 30e-6)


class Size(NamedTuple):
    """A simulation."""

    clients: int  # that take part in a round
    dim: int
    steps: int  # t_T
    rounds: int  # T
    replications: int
    matrices: bool = True  # full random scaling and plug-in, or the diagonal mode
    lanes: int = 1  # cells that run side by side, each with so many replications

    @property
    def draws(self) -> int:
        """Standard draws of an observation: covariates and noise."""
        return self.dim + 1


# Of the compiled programs (`scripts/compile_for_accelerators`): a local step with its draws and statistics.
KERNELS_A_STEP = 3.4


def step_bytes(size: Size) -> float:
    """Return the bytes that a local step of one client in one replication moves.

    Draws are written once and read four or five times, for all lanes; of each two steps, the clients are
    read by three kernels and written by one; residuals are written once and read three times. An average
    and the statistics move eleven vectors per step, and the matrices three of them in and out per 16 steps.
    """
    draws = 4 * size.draws * (1 + 4.5)
    clients = 4 * size.dim * (3 + 1) / 2
    matrices = 2 * 3 * size.dim**2 / 16 if size.matrices else 0
    return (
        draws / size.lanes + clients + 4 * (1 + 3) + 4 * (11 * size.dim + matrices) / size.clients
    )


def step_operations(size: Size) -> float:
    """Return the operations of one client-step: threefry's 20 rounds serve two draws; the rest is multiplications."""
    generator = (20 * 3 + 15) / 2 + 25
    return size.draws * generator / size.lanes + 10 * size.dim


def state_bytes(size: Size) -> float:
    """Return the memory of one replication of all lanes: clients, two steps of draws three times, statistics twice."""
    matrices = 4 * size.dim**2 if size.matrices else 0
    draws = size.clients * 3 * 8 * size.draws
    own = size.clients * 4 * 3 * size.dim + 4 * 2 * (matrices + 12 * size.dim)
    return draws + size.lanes * own


class Cost(NamedTuple):
    """Where a simulation's time goes, on one of the devices that share it."""

    side_by_side: int  # replications on a device at once
    launches: float  # seconds
    work: float
    network: float
    binds: str

    @property
    def seconds(self) -> float:
        """The sum."""
        return self.launches + self.work + self.network


def cost(size: Size, device: Device, devices: int, shard_clients: bool = False) -> Cost:
    """Return the cost if replications, or else clients with one sum per round, are dealt to the devices."""
    mine = size._replace(clients=-(-size.clients // devices)) if shard_clients else size
    share = size.replications if shard_clients else -(-size.replications // devices)
    wide = int(min(share, 0.8 * device.memory / state_bytes(mine)))
    if wide < 1:
        raise ValueError("one replication does not fit on a device; shard its clients over more")
    passes = -(-share // wide)
    launches = passes * size.steps * KERNELS_A_STEP * device.launch
    each = max(step_bytes(mine) / device.bandwidth, step_operations(mine) / device.rate)
    work = share * size.steps * mine.clients * size.lanes * each
    network = 0.0
    if shard_clients and devices > 1:
        sums = 4 * (2 * size.dim + (size.dim**2 if size.matrices else 0))
        ring = 2 * (devices - 1) / devices * share * sums / device.link
        network = size.rounds * (passes * device.latency + ring)
    bytes_bind = step_bytes(mine) / device.bandwidth > step_operations(mine) / device.rate
    names = {
        launches: "launches",
        work: "memory" if bytes_bind else "generator",
        network: "network",
    }
    return Cost(wide, launches, work, network, names[max(names)])


PAPER = Size(10, 5, 40_000, 3_463, 10**6)
TABLE = [
    ("10⁶ replications of a cell, t_T = 40,000, P(1/2)", PAPER, 1, False),
    ("the same under C1", PAPER._replace(rounds=40_000), 1, False),
    ("the same, P(1/2)", PAPER, 64, False),
    ("1,000 replications, P(1/2)", PAPER._replace(replications=1_000), 1, False),
    (
        "K = 10⁵, d = 100, diagonal, 1 replication, C5",
        Size(10**5, 100, 40_000, 8_000, 1, False),
        1,
        False,
    ),
    ("the same, clients sharded", Size(10**5, 100, 40_000, 8_000, 1, False), 8, True),
    (
        "K = 10⁶ of which 10⁴ per round, d = 100, diagonal, 1,000 replications, C5",
        Size(10**4, 100, 40_000, 8_000, 1_000, False),
        64,
        False,
    ),
    (
        "the same with full matrices, clients sharded",
        Size(10**4, 100, 40_000, 8_000, 1_000, True),
        64,
        True,
    ),
]


HORIZONS = (5_000, 10_000, 20_000, 40_000)  # of the paper's Table 4, under five schedules each
WIDTH = 24  # lanes of a program for 1,000 replications, see `jaxlsgd.engine.cost.LANES`


def grid_seconds(replications: int) -> tuple[float, float]:
    """Return the time of all 20 cells of Table 4 one after another, and as lanes, empty ones included."""
    cells = [PAPER._replace(steps=steps, replications=replications) for steps in HORIZONS]
    one_by_one = 5 * sum(cost(cell, H100, 1).seconds for cell in cells)
    return one_by_one, cost(cells[-1]._replace(lanes=WIDTH), H100, 1).seconds


def markdown() -> str:
    """Return the table for sizes that were not run."""
    lines = [
        "# On paper: what other sizes would cost",
        "",
        "**A model, not a measurement.** Its form, its numbers and where they come from are in "
        "[cost_model.py](../cost_model.py); how well the form fits the processor at hand is in "
        "[results.md](results.md).",
        "",
        "| simulation | devices | side by side on each | seconds | launches | work | network | what binds |",
        "|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    for what, size, devices, sharded in TABLE:
        found = cost(size, H100, devices, sharded)
        times = " | ".join(
            _seconds(t) for t in (found.seconds, found.launches, found.work, found.network)
        )
        lines.append(
            f"| {what} | {devices} H100 | {found.side_by_side:,} | {times} | {found.binds} |"
        )
    apart, together = grid_seconds(1_000)
    lines += [
        "",
        f"The 20 cells of the paper's Table 4, 1,000 replications each, on one H100: {_seconds(apart)} s one after "
        f"another, {_seconds(together)} s as lanes of one program (of {WIDTH}, to the longest horizon).",
        "",
        "Partial participation is modelled as the clients that take part: the engine steps no others, and a client "
        "that sits out keeps nothing (it starts each of its rounds from the average), so 10⁶ clients cost what those "
        "of a round cost, and the choice of a round's clients is one more draw. The engine does not offer it yet.",
        "",
        "- **One device, a few thousand replications: launches bind.** They do not depend on R, so more "
        "replications side by side are free until work takes over, at about "
        f"R = {_balance(PAPER):,} for the paper's problem.",
        f"- **One device, 10⁶ replications: {cost(PAPER, H100, 1).binds} binds.** Of {step_bytes(PAPER):.0f} bytes per "
        f"client-step, {4 * PAPER.draws * 5.5:.0f} are draws, written once and read four or five times; lanes share "
        f"them ({step_bytes(PAPER._replace(lanes=20)):.0f} bytes with 20). A kernel that made a whole step in one pass "
        "would save that too.",
        "- **Many devices: nothing new binds** while replications are dealt out; each device needs enough of them "
        "to be past its launches.",
        "- **Clients sharded:** the sum of a round is small in the diagonal mode (latency binds) and large with "
        "matrices, d² numbers per replication: then the network binds, and E_m is what buys it back.",
        "",
    ]
    return "\n".join(lines)


def _balance(size: Size) -> int:
    each = max(step_bytes(size) / H100.bandwidth, step_operations(size) / H100.rate)
    return round(KERNELS_A_STEP * H100.launch / (each * size.clients), -2).__int__()


def _seconds(value: float) -> str:
    return "–" if value == 0 else f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def run(quick: bool) -> tuple[list[Finding], dict[str, Any]]:
    """Fit launch and work of one core to some widths, and predict the others."""
    devices = cases.start(1)[:1]
    steps = 128 if quick else STEPS

    def job(R: int) -> Any:
        return functools.partial(
            cases.simulate, "linear", "P(1/2)", steps, replications=R, tile_size=R, devices=devices
        )

    jobs = {str(R): job(R) for R in (*FITTED, *TRIED)}
    for each in jobs.values():
        each()
    times = interleaved(jobs, 2 if quick else 7)
    seconds = medians(times)
    design = np.array([[1.0, R] for R in FITTED])
    measured = np.array([seconds[str(R)] for R in FITTED])
    # Relative errors count alike at all widths.
    fixed, each = np.linalg.lstsq(design / measured[:, None], np.ones(len(FITTED)), rcond=None)[0]
    case = "linear, P(1/2), one core"
    findings = [
        finding(case, "launches, per step", 1e6 * fixed / steps, "µs"),
        finding(case, "work, per client-step", 1e9 * each / (steps * 10), "ns"),
    ]
    for R in TRIED:
        off = abs((fixed + each * R) / seconds[str(R)] - 1)
        what = f"predicted for R = {R}, not in the fit: off by"
        findings.append(finding(case, what, 100 * off, "%", at_most=15))
    return findings, {"seconds": times}
