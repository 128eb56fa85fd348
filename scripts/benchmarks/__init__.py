"""Benchmarks run by `bench.py`: paired timing, our entrants, PyTorch's, and the tables of the documentation."""
