"""Where bytes are reduced and moved: over shared memory, over the network, both, or on GPUs."""
