"""Autoregressive text generation: prefill, then a decoding loop with KV caches or recurrent states.

`request.py` validates arguments and pads prompts to buckets, so that few programs are compiled; `decode.py` has the
prefill and decode programs, for one device or a mesh; `run.py` has `generate`.
"""

from .run import generate

__all__ = ["generate"]
