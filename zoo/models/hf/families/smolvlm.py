"""SmolVLM (Marafioti et al., arXiv:2504.05299): Idefics 3 with smaller parts, and more patches joined."""

from zoo.models.hf import grammar as hf

from . import idefics3

SMOLVLM = hf.make_image_text_family(
    "smolvlm", "SmolVLMForConditionalGeneration", idefics3.make_facts("smolvlm_vision"), **idefics3.KEYS
)
