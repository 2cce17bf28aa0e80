"""What hvlike takes from the system below it, at one place that a simulation of whole jobs can replace."""
