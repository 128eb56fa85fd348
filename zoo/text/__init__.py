"""Text for training and for checkpoints: tokenizers, chat templates, cached corpora, batches, synthetic tasks."""

from .chat import ChatError, ChatTemplate
from .tokenizers import Tokenizer, find_tokenizer, have_equal_tokens, read_tokenizer

__all__ = ["ChatError", "ChatTemplate", "Tokenizer", "find_tokenizer", "have_equal_tokens", "read_tokenizer"]
