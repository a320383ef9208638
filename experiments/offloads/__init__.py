"""What stands behind `offload.py`: what of a step waits, what memory it takes, and the models of others' slides."""
