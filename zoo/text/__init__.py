"""Text for training and for checkpoints: tokenizers, cached corpora, batches, synthetic tasks."""
