"""The choice of a plan: all that there are, the best of them, and why."""
