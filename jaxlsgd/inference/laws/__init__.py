"""The distributions behind critical values and p-values."""
