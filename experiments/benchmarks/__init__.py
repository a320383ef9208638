"""What stands behind `bench_gpu.py`: its rows, the same models in PyTorch, and what a compiled step must show."""
