"""mBART (Liu et al., arXiv:2001.08210): BART with norms before the sublayers. Targets begin with the code of their
language."""

from . import bart

WIRING = bart.Wiring(positions=2, norm_first=True, embedding_norm=True)

MBART = bart.make_bart_family("mbart", "MBartForConditionalGeneration", WIRING, {})
