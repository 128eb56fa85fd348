"""Optimizers: AdamW with moments in few bytes, which parameters decay, and updates that are rounded stochastically."""
