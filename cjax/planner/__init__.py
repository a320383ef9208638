"""Which plan: arithmetic and search over hardware facts; returns data."""
