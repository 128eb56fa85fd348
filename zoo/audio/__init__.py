"""Audio: from samples to the features that an encoder reads."""

from .log_mel import log_mel_features

__all__ = ["log_mel_features"]
