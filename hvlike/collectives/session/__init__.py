"""hvlike between init() and shutdown(): the context, its process sets, and the way of a call into them."""
