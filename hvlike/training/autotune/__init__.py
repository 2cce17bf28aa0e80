"""HVLIKE_AUTOTUNE=1: find bucket size, first-bucket size and cycle time while training runs."""
