"""mT5 (Xue et al., arXiv:2010.11934): T5 v1.1 with a vocabulary of 101 languages."""

from . import t5

DEFAULTS = {
    "vocab_size": 250112,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "feed_forward_proj": "gated-gelu",
}

MT5 = t5.make_t5_family("mt5", "MT5ForConditionalGeneration", defaults=DEFAULTS)
