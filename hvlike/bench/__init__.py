"""Measurements that compare hvlike with others in one run; one benchmark a file, all under `python -m hvlike bench`."""
