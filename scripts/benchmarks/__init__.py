"""What `bench.py` runs: how time is taken, our side, PyTorch's side, and the page that shows what came out."""
