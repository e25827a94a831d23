"""Distributions behind critical values and p-values, in NumPy. Start reading at `standard`."""
