"""The tables and figures of the paper, reproduced beside the printed ones: start at `reproduce.reproduce`."""
