"""Chat templates: the Jinja program of a checkpoint that turns messages into the text that its model was trained on.

    template = ChatTemplate.read(directory)
    messages = [{"role": "user", "content": "What is a pytree?"}]
    tokens = template.encode(messages, tokenizer, add_generation_prompt=True)
    ((tokens, mask),) = encode_conversation(template, answered, tokenizer)  # to train on where the mask is True

Special tokens that a message spells are plain text: no user ends the turn of another by typing `<|im_end|>`.
"""

from .encode import EncodedText, encode_conversation, encode_spans, find_end_of_turn
from .errors import ChatError, NoChatTemplateError
from .special_tokens import encode_rendered, protect
from .template import (
    PLAIN_TEMPLATE,
    TEMPLATE_FILE,
    ChatTemplate,
    RenderedChat,
    find_special_tokens,
    read_chat_template,
    read_special_tokens,
)
from .tool_schema import tool_schema
from .write import write_chat_files

__all__ = [
    "PLAIN_TEMPLATE",
    "TEMPLATE_FILE",
    "ChatError",
    "ChatTemplate",
    "EncodedText",
    "NoChatTemplateError",
    "RenderedChat",
    "encode_conversation",
    "encode_rendered",
    "encode_spans",
    "find_end_of_turn",
    "find_special_tokens",
    "protect",
    "read_chat_template",
    "read_special_tokens",
    "tool_schema",
    "write_chat_files",
]
