"""What users wrap: optimizers, broadcast of state, gradient clipping."""
