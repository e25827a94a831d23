"""A study's directory: its files, its readers, its one writer."""
