"""Contracts and what every room uses: problems, algorithms, estimators, rows, checks."""
