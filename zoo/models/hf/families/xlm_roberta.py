"""XLM-RoBERTa (Conneau et al., arXiv:1911.02116): RoBERTa by another name, with other defaults."""

import dataclasses
from functools import partial

from zoo.models.hf import grammar as hf

from . import bert, roberta

_NAMES = partial(roberta.map_roberta_names, "XLMRoberta")

XLM_ROBERTA = dataclasses.replace(
    roberta.ROBERTA,
    name="xlm-roberta",
    architecture="XLMRobertaForMaskedLM",
    build=partial(roberta.build_roberta, "XLMRoberta"),
    names=_NAMES,
    defaults={**bert.DEFAULTS, "pad_token_id": hf.non_negative(1)},
    find_ignored_tensors=partial(hf.find_other_heads, _NAMES, "roberta", roberta.HEADS),
)
