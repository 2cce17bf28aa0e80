"""What a user can see of a run: logging with ranks."""
