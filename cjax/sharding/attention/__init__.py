"""Attention over split positions or heads: rings, exchanges, fused kernels."""
