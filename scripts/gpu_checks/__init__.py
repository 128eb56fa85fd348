"""Checks of `on_gpu.py`: what each of them times on a GPU, how a process of its own does it, and the tables of
docs/gpu.md."""
