"""Buckets, and the compiled steps of plans: agreed once, they run without a message."""
