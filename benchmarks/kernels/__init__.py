"""Benchmarks of the tensor operators: `python -m benchmarks.kernels [--quick]`."""
