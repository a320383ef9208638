"""What stands behind `large_batch.py`: models and their data, the optimizers' recipes, runs, tables and pictures."""
