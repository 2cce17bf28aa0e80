"""Buckets, and the steps of plans: agreed once, they run without a message."""
