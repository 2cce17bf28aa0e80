"""Negotiation of named requests, and running what was agreed."""
