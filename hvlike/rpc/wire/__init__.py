"""How values travel between workers: messages, pickling, tensors, devices."""
