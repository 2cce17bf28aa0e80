"""Shared memory, doorbells, dtypes, and copies between processes of one node."""
