"""The public collectives, one file an operation."""
