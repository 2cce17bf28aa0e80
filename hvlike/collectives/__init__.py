"""Named tensors go in, handles come out: requests, agreement, plans, and one file a collective."""
