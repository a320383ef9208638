"""Many jobs on one cluster: who gets how many devices, when, and under which plan; needs no JAX."""
