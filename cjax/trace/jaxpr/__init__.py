"""Equations and programs of JAX: what each does, flattened, folded, compared, counted. Knows nothing of a model."""
