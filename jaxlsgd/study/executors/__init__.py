"""Where the jobs of a study run."""
