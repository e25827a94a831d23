"""The two functions that run algorithms: `simulate` for many replications, `fit` for one.

`cell` checks what both are given, and makes rows from measurements. Start reading at `simulate.simulate`. The text of
`print(fit)` is made in `fit`.
"""
