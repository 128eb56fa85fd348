"""mT5 (Xue et al., arXiv:2010.11934): T5 v1.1 with a vocabulary of 101 languages."""

from . import t5

MT5 = t5.make_t5_family("mt5", "MT5ForConditionalGeneration")
