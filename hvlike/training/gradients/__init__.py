"""Gradients between backward and step: hooks, names, settings, planned reduction."""
