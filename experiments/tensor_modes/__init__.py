"""What stands behind `tensor_parallel.py`: layers measured on absent cards and timed here; tables and pictures."""
