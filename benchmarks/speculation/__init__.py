"""Speculation economics (B5): which policy has the pairs that rankers ask for, at which cost."""
