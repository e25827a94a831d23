"""Measures of a simulation study, from rows alone."""
