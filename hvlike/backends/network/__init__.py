"""Collectives among ranks on different nodes, over MPI messages."""
