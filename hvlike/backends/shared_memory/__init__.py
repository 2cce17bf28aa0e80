"""Collectives among the ranks of one node, over memory that they share."""
