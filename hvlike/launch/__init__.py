"""Jobs that are started from Python: hvd.run."""
