"""Autoregressive text generation: prefill, then a decoding loop with KV caches or recurrent states.

`request.py` checks arguments; `buckets.py` rounds sizes up and pads prompts, so that few programs are compiled;
`prefill.py` reads prompts and prefixes; `decode.py` has the decoding loop, and `speculative.py` the loop with a draft,
for one device or a mesh; `run.py` has `generate`, `stream.py` continuous batching, and `conversation.py` a text that
goes on in turns.
"""

from .conversation import Conversation
from .stream import Request

__all__ = ["Conversation", "Request"]
