"""Coverage studies: a grid of cells, run in tiles, kept in a directory, resumable."""

from jaxlsgd.study.errors import SpecError
from jaxlsgd.study.runner import Outcome, run
from jaxlsgd.study.spec import Study
from jaxlsgd.study.store.codec import Damaged, StoreError
from jaxlsgd.study.store.reader import Results

__all__ = ["Damaged", "Outcome", "Results", "SpecError", "StoreError", "Study", "run"]
