"""UMT5 (Chung et al., arXiv:2304.09151): mT5 with a table of relative biases in every layer."""

from . import mt5, t5

UMT5 = t5.make_t5_family("umt5", "UMT5ForConditionalGeneration", shares_bias=False, defaults=mt5.DEFAULTS)
