"""Tests that run Triton kernels."""
