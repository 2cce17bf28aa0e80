"""What users are shown of the inside: the timeline and the log. Imports nothing of ours but errors and config."""
