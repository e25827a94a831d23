"""Figures 1 to 3 of the paper from the rows of their study: drawn, and the data behind them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jaxlsgd.core.rows import CellRows
from jaxlsgd.report import drawing
from jaxlsgd.report import panels as drawn
from jaxlsgd.report.paper.sheet import write_csv
from jaxlsgd.report.paper.targets import title
from jaxlsgd.study.store.codec import cannot

_ALONG = "coverage and length against communication rounds; plug-in above, random scaling below."
_CAPTIONS = {
    "figure1": "L2 error of the average against communication rounds; left linear, right logistic.",
    "figure2": f"Linear regression: {_ALONG}",
    "figure3": f"Logistic regression: {_ALONG}",
}
_WHERE = ("problem", "schedule", "num_steps", "save_round", "save_steps", "method", "level")
_CURVES = ("coverage", "coverage_mcse", "length", "length_mcse", "l2_error", "l2_error_mcse")
COLUMNS = (*_WHERE, *_CURVES, "n_ok")


def write(target: str, cells: Sequence[CellRows], warmup: int, directory: Path) -> tuple[str, str]:
    """Writes a figure as PNG, PDF and CSV; returns it as Markdown, and its caption.

    Args:
      target: "figure1", "figure2" or "figure3".
      cells: what it shows, read along the rounds.
      warmup: rounds of warm-up, which are marked.
      directory: where to write.
    """
    rows = [row for cell in cells for row in drawn.first_coordinate(cell)]
    if target == "figure1":
        figure = drawn.error_along_rounds(rows, lambda problem: warmup)
    else:
        figure = drawn.along_rounds(rows, warmup)
    try:
        drawing.save(figure, directory / target)
    except OSError as error:
        raise cannot("write", directory / target, error) from error
    write_csv(directory / f"{target}.csv", rows, COLUMNS)
    runs, rounds = rows[0]["replications"], rows[0]["num_rounds"]
    size = f"{runs:,} runs of T = {rounds:,} rounds, E = 1 for the first {warmup:,} of them."
    caption = f"{title(target)}: {_CAPTIONS[target]} {size}"
    return f"{caption}\n\n![{title(target)}]({target}.png)\n", caption
