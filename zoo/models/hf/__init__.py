"""Hugging Face checkpoints: how a family's config maps to our layers, and how its tensors are named."""
