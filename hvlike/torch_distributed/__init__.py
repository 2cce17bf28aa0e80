"""The backend "hvlike" of torch.distributed."""
