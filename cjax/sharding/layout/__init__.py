"""A plan and the dims of a trace become mesh axes: which dim of which tensor goes over which."""
