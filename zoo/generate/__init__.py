"""Autoregressive text generation: prefill, then a decoding loop with KV caches or recurrent states.

`request.py` checks arguments; `buckets.py` rounds sizes up and pads prompts, so that few programs are compiled;
`prefill.py` reads prompts and prefixes; `decode.py` has the decoding loop, and `speculative.py` the loop with a draft,
for one device or a mesh; `run.py` has `generate`, `stream.py` continuous batching, and `conversation.py` a text that
goes on in turns.
"""

from .conversation import Conversation
from .prefill import Prefix, prefill
from .request import DecodedText
from .run import Generated, generate
from .stream import Request, StreamedTokens, generate_stream

__all__ = [
    "Conversation",
    "DecodedText",
    "Generated",
    "Prefix",
    "Request",
    "StreamedTokens",
    "generate",
    "generate_stream",
    "prefill",
]
