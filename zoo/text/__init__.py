"""Text for training and for checkpoints: tokenizers, chat templates, cached corpora, batches, synthetic tasks."""

from .chat.encode import encode_conversation
from .chat.template import ChatTemplate, read_chat_template
from .tokenizers import find_tokenizer

__all__ = ["ChatTemplate", "encode_conversation", "find_tokenizer", "read_chat_template"]
