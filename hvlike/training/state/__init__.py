"""One rank's parameters and optimizer state on all ranks."""
