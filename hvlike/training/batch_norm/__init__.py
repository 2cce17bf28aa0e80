"""SyncBatchNorm: batch normalisation over the batches of all ranks."""
