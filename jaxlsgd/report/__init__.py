"""Reports: rows of a study as tables and figures, and the paper's own reproduced."""
