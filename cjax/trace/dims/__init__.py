"""Which dims of which tensors are the same dim, and what a layout must know of each."""
