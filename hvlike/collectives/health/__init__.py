"""Stalls, deadlocks and the end of a job: who waits for whom, and where the missing ranks are."""
