"""PyTorch's side: the same work in torch and transformers, as their users would write it for speed.

The model is `LlamaForCausalLM` of the same sizes, or `MixtralForCausalLM`, with attention by
`scaled_dot_product_attention` (transformers' default), AdamW in one fused kernel, and autocast for bfloat16. Of experts
transformers has several implementations: "eager" loops over them, "grouped_mm" and "batched_mm" do not. Needs torch and
transformers.
"""

import time
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
from transformers import (  # pyright: ignore[reportMissingImports]
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from .ours import Sizes, first_and_later


def model(sizes: Sizes, experts: str = "eager") -> Any:
    torch.manual_seed(0)
    shared: dict[str, Any] = dict(
        vocab_size=sizes.vocab,
        hidden_size=sizes.embed,
        intermediate_size=sizes.mlp,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    if not sizes.experts:
        return LlamaForCausalLM(LlamaConfig(**shared)).to(device())
    mixture = {"num_local_experts": sizes.experts, "num_experts_per_tok": sizes.top, "num_key_value_heads": sizes.heads}
    config = MixtralConfig(**shared, **mixture, rms_norm_eps=1e-6, experts_implementation=experts)
    return MixtralForCausalLM(config).to(device())


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


class Training:
    """A step of AdamW; called, it takes one."""

    def __init__(self, sizes: Sizes, dtype: str, *, compiled: bool, experts: str = "eager"):
        self.model = model(sizes, experts).train()
        self.forward = torch.compile(self.model) if compiled else self.model
        self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
        self.tokens = torch.randint(0, sizes.vocab, (sizes.batch, sizes.seq), device=device())
        self.dtype = dtype

    def __call__(self) -> None:
        with torch.autocast(device(), torch.bfloat16, enabled=self.dtype == "bfloat16"):
            loss = self.forward(input_ids=self.tokens, labels=self.tokens, use_cache=False).loss
        loss.backward()
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        loss.item()


def first_step(layers: int, *, compiled: bool) -> dict[str, float]:
    """Seconds in which a new process makes its model and optimiser, takes a first step, and a later one."""
    start = time.perf_counter()
    run = Training(Sizes(layers=layers), "float32", compiled=compiled)
    return {"born": time.perf_counter() - start, **first_and_later(run)}


class Decoding:
    """Greedy tokens after a prompt, with transformers' cache."""

    def __init__(self, sizes: Sizes, batch: int, *, prompt: int = 16, new: int = 128, dtype: str = "float32"):
        self.model = model(sizes).eval().to(getattr(torch, dtype))
        self.tokens = torch.randint(0, sizes.vocab, (batch, prompt), device=device())
        self.new = new

    @torch.inference_mode()
    def __call__(self) -> None:
        mask = torch.ones_like(self.tokens)
        made = self.model.generate(
            self.tokens, attention_mask=mask, max_new_tokens=self.new, min_new_tokens=self.new, do_sample=False
        )
        assert made.shape[1] == self.tokens.shape[1] + self.new
