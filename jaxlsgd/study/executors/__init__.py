"""Where the jobs of a study run: threads, Dask workers, or joined processes. Start at `base.Executor`."""
