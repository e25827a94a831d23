"""Where the jobs of a study run: threads or Dask workers. Start at `base.Executor`."""
