"""Fixtures of the command line."""

from tests.command_line import bytes_model, checkpoint, gpt2, refused, run, text_model

__all__ = ["bytes_model", "checkpoint", "gpt2", "refused", "run", "text_model"]
