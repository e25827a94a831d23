"""Coverage studies: a grid of cells, run in tiles by an executor, kept in a directory, resumable.

Start reading at `study.Study`, then `runner.run`, `jobs.run_job` and `store.writer.Writer`.
"""

from jaxlsgd.core.lazy import attach

_WHERE = {
    "ArrayPart": "jaxlsgd.study.array",
    "Damaged": "jaxlsgd.study.store.files",
    "Outcome": "jaxlsgd.study.runner",
    "Results": "jaxlsgd.study.store.reader",
    "SpecError": "jaxlsgd.study.errors",
    "StoreError": "jaxlsgd.study.store.files",
    "Study": "jaxlsgd.study.study",
    "collect": "jaxlsgd.study.store.collect",
    "replay": "jaxlsgd.study.replaying",
    "run": "jaxlsgd.study.runner",
}
__getattr__, __dir__ = attach(__name__, _WHERE)
__all__ = [*_WHERE]
