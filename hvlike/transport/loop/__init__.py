"""Coroutines, the progress loop that drives them, and its threads."""
