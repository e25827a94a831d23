from jaxlsgd.simulation import *  # noqa
from jaxlsgd.simulation import (
    Task,
    cell_rows,
    on_devices,
    run_replications,
    simulate,
    DEFAULT_TILE,
    DTYPES,
)  # noqa
