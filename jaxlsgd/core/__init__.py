"""The contracts, and what every room uses: checks of arguments, kinds by name, files, random words, text.

Start with `problem`, `algorithm` and `estimator`; `rows` is what comes out of a run. `random` has random words and
the choice of clients; the draws of observations are in `engine.draws`.
"""
