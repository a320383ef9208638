"""A trace cut into what a pipeline runs: before, layers, after, and what crosses between."""
