"""Encoders of texts and images: BERT, vision Transformers and their kin, on the blocks and the stack of decoders."""
