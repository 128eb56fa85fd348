"""Layers of encoders: the embedding of images, attention in both directions, and pooling of tokens."""
