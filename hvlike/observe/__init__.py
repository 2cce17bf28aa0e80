"""The timeline, the log and the counters. Imports nothing of hvlike but errors and config."""
