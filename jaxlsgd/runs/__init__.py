"""The two functions that run algorithms: `simulate` for many replications, `fit` for one.

`cell` has what both are given, checked, and the way from measurements to rows. Start reading at `simulate`.
"""
