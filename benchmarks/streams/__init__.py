"""Throughput and latency of the worker path."""
