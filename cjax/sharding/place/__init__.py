"""A layout applied to a trace: a loss that computes where its arrays are."""
