"""A study's directory: its files, its readers, its one writer. Start at `reader`, which lists the files."""
