"""Interval methods of other authors, one file each, to compare with."""
