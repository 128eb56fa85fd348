"""Autoregressive text generation: prefill, then a decoding loop with KV caches or recurrent states.

`request.py` checks arguments; `buckets.py` rounds sizes up and pads prompts, so that few programs are compiled;
`decode.py` has the prefill and decode programs, for one device or a mesh; `run.py` has `generate`, and
`conversation.py` a text that goes on in turns.
"""

from .conversation import Conversation
from .run import generate

__all__ = ["Conversation", "generate"]
