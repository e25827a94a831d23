"""The front doors: `simulate` for many replications, `fit` for one."""
