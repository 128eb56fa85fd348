"""PyTorch's entrants: the same work in torch and transformers, as their users would write it for speed.

The model is `LlamaForCausalLM` of the same sizes, or `MixtralForCausalLM`, with attention by
`scaled_dot_product_attention` (transformers' default), AdamW in one fused kernel, and autocast for bfloat16. Of experts
transformers has several implementations: "eager" loops over them, "grouped_mm" and "batched_mm" do not.

Recurrent models are `MambaForCausalLM` and `Mamba2ForCausalLM`, and for Gated DeltaNet the layers of Qwen3-Next in a
stack of our own, since a whole Qwen3-Next has a mixture of experts after each. All three compute in PyTorch's own
operations, as transformers does where its kernels are not installed. Needs torch and transformers.
"""

import copy
import time
import types
from pathlib import Path
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
from transformers import (  # pyright: ignore[reportMissingImports]
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3NextConfig,
)
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next  # pyright: ignore[reportMissingImports]

from .ours import Sizes, first_and_later
from .recurrences import Recurrent


def model(sizes: Sizes, experts: str = "eager") -> Any:
    torch.manual_seed(0)
    if isinstance(sizes, Recurrent):
        return RECURRENT[sizes.kind](sizes).to(device())
    shared: dict[str, Any] = dict(
        vocab_size=sizes.vocab,
        hidden_size=sizes.embed,
        intermediate_size=sizes.mlp,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        max_position_embeddings=65536,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    if not sizes.experts:
        return LlamaForCausalLM(LlamaConfig(**shared)).to(device())
    mixture = {"num_local_experts": sizes.experts, "num_experts_per_tok": sizes.top, "num_key_value_heads": sizes.heads}
    config = MixtralConfig(**shared, **mixture, rms_norm_eps=1e-6, experts_implementation=experts)
    return MixtralForCausalLM(config).to(device())


def shell(sizes: Recurrent) -> dict[str, Any]:
    """Return the fields that all configurations share."""
    sized = {"vocab_size": sizes.vocab, "hidden_size": sizes.embed, "num_hidden_layers": sizes.layers}
    return sized | {"tie_word_embeddings": True, **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))}


def mamba(sizes: Recurrent) -> Any:
    """Build a Mamba with our inner width, 512, and state size, 16."""
    return MambaForCausalLM(MambaConfig(**shell(sizes), state_size=16, expand=2))


def mamba2(sizes: Recurrent) -> Any:
    """Build a Mamba-2 with our sizes."""
    heads = {"num_heads": 8, "head_dim": 64, "state_size": 128, "n_groups": 1}
    return Mamba2ForCausalLM(Mamba2Config(**shell(sizes), **heads, chunk_size=64))


class GatedDeltaNet(torch.nn.Module):
    """Qwen3-Next's linear-attention layers as pre-norm residual blocks with tied embeddings, like our model."""

    def __init__(self, sizes: Recurrent):
        super().__init__()
        config = Qwen3NextConfig(
            hidden_size=sizes.embed,
            num_hidden_layers=sizes.layers,
            layer_types=["linear_attention"] * sizes.layers,
            linear_num_key_heads=4,
            linear_num_value_heads=4,
            linear_key_head_dim=64,
            linear_value_head_dim=128,
        )
        norm = lambda: torch.nn.RMSNorm(sizes.embed, eps=1e-6)
        self.embedding = torch.nn.Embedding(sizes.vocab, sizes.embed)
        torch.nn.init.normal_(self.embedding.weight, std=0.02)
        self.norms = torch.nn.ModuleList(norm() for _ in range(sizes.layers))
        self.mixers = torch.nn.ModuleList(qwen3_next.Qwen3NextGatedDeltaNet(config, i) for i in range(sizes.layers))
        self.norm = norm()

    def forward(self, input_ids: Any, labels: Any, use_cache: bool) -> Any:
        """Return an object with the `loss`, as transformers does."""
        x = self.embedding(input_ids)
        for norm, mixer in zip(self.norms, self.mixers, strict=True):
            x = x + mixer(norm(x))
        logits = torch.nn.functional.linear(self.norm(x)[:, :-1], self.embedding.weight)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        return types.SimpleNamespace(loss=loss)


RECURRENT = {"Mamba": mamba, "Mamba-2": mamba2, "Gated DeltaNet": GatedDeltaNet}
SLOW = ("Mamba",)
"""Models whose step takes a minute on a CPU."""


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def find_peak() -> dict[str, Any]:
    """Return the largest memory that tensors have had since the last call, on a GPU."""
    if device() == "cpu":
        return {}
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return {"peak": peak}


class Training:
    """AdamW training; a call runs one step."""

    def __init__(self, sizes: Sizes, dtype: str, *, compiled: bool, experts: str = "eager"):
        self.model = model(sizes, experts).train()
        self.forward = torch.compile(self.model) if compiled else self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
        self.tokens = torch.randint(0, sizes.vocab, (sizes.batch, sizes.seq), device=device())
        self.dtype = dtype

    def __call__(self) -> None:
        with torch.autocast(device(), torch.bfloat16, enabled=self.dtype == "bfloat16"):
            loss = self.forward(input_ids=self.tokens, labels=self.tokens, use_cache=False).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        loss.item()


class Adapting(Training):
    """Training of a LoRA or DoRA by PEFT, around every linear layer but the head; or of all parameters."""

    def __init__(self, sizes: Sizes, dtype: str, *, kind: str, rank: int):
        super().__init__(sizes, dtype, compiled=False)
        if kind != "full":
            import peft  # pyright: ignore[reportMissingImports]

            options = {"r": rank, "lora_alpha": rank, "target_modules": "all-linear", "use_dora": kind == "DoRA"}
            self.forward = self.model = peft.get_peft_model(self.model, peft.LoraConfig(**options)).train()
        trainable = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trainable, lr=1e-3, weight_decay=0.1, fused=True)

    def bytes_learning(self) -> int:
        """Count the bytes of gradients and moments."""
        return 3 * sum(x.nbytes for group in self.optimizer.param_groups for x in group["params"])


def first_step(layers: int, *, compiled: bool) -> dict[str, float]:
    """Measure the seconds to initialize model and optimizer, of the first step, and of a later one."""
    start = time.perf_counter()
    run = Training(Sizes(layers=layers), "float32", compiled=compiled)
    return {"born": time.perf_counter() - start, **first_and_later(run)}


class Decoding:
    """Greedy decoding after a prompt, with transformers' KV cache: growing, or if `static` of one size, for which
    transformers compiles the step."""

    def __init__(
        self,
        sizes: Sizes,
        batch: int,
        *,
        prompt: int = 16,
        new: int = 128,
        dtype: str = "float32",
        static: bool = False,
    ):
        self.options = {"cache_implementation": "static"} if static else {}
        self.model = model(sizes).eval().to(getattr(torch, dtype))
        self.tokens = torch.randint(0, sizes.vocab, (batch, prompt), device=device())
        self.new = new

    @torch.inference_mode()
    def __call__(self) -> None:
        lengths = {"max_new_tokens": self.new, "min_new_tokens": self.new}
        mask = torch.ones_like(self.tokens)
        generated = self.model.generate(self.tokens, attention_mask=mask, do_sample=False, **lengths, **self.options)
        assert generated.shape[1] == self.tokens.shape[1] + self.new


def open_checkpoint(directory: Path) -> Any:
    """Open a checkpoint in transformers."""
    return LlamaForCausalLM.from_pretrained(directory).to(device()).eval()


class Rollouts:
    """Generation from one prompt in many rows, and with drafts, as transformers' users would write it."""

    def __init__(self, model: Any, draft: Any, shared: Any, questions: Any, repeated: Any, *, new: int, drafted: int):
        move = lambda x: torch.from_numpy(x).long().to(device())
        self.model, self.draft = model, draft
        self.shared, self.questions, self.repeated = move(shared), move(questions), move(repeated)
        self.texts = torch.cat([self.shared.repeat(len(self.questions), 1), self.questions], dim=1)
        self.new, self.drafted = new, drafted
        for each in (model, draft):
            each.generation_config.eos_token_id = None
        config = self.draft.generation_config
        config.num_assistant_tokens, config.num_assistant_tokens_schedule = drafted, "constant"
        config.assistant_confidence_threshold = 0.0
        self.cache = DynamicCache(config=self.model.config)
        with torch.inference_mode():
            self.model(self.shared, past_key_values=self.cache)

    @torch.inference_mode()
    def generate(self, tokens: Any, **options: Any) -> None:
        """Generate from tokens; block until the result is there."""
        options = {"do_sample": False, "max_new_tokens": self.new, "pad_token_id": 0} | options
        text = self.model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
        assert text.shape[1] == tokens.shape[1] + self.new

    def follow_prefix(self) -> None:
        """Copy the cache of the prompt for each row, as transformers' documentation of prefilled caches does."""
        cache = copy.deepcopy(self.cache)
        cache.batch_repeat_interleave(len(self.questions))
        self.generate(self.texts, past_key_values=cache)

    def read_each(self) -> None:
        """Read the prompt in each row."""
        self.generate(self.texts)

    def sample(self) -> None:
        """Sample several texts of one prompt."""
        self.generate(self.shared, do_sample=True, top_k=0, num_return_sequences=len(self.questions))

    def decode(self) -> None:
        """Generate one text without a draft."""
        self.generate(self.repeated)

    def look_up(self) -> None:
        """Look tokens up in the prompt."""
        self.generate(self.repeated, prompt_lookup_num_tokens=self.drafted)

    def speculate(self) -> None:
        """Let a draft model propose tokens."""
        self.generate(self.repeated, assistant_model=self.draft)


class Prefill(Decoding):
    """Greedy generation of one token after a prompt of `seq` tokens, which fills the KV cache."""

    def __init__(self, sizes: Sizes, seq: int):
        super().__init__(sizes, 1, prompt=seq, new=1)


class Attention:
    """Causal `scaled_dot_product_attention` of one row in float32, alone or with the gradient of its three inputs."""

    def __init__(self, seq: int, heads: int, kv_heads: int, head_dim: int, *, gradient: bool):
        draw = lambda count: torch.randn(1, count, seq, head_dim, device=device(), requires_grad=gradient)
        self.inputs, self.gradient = (draw(heads), draw(kv_heads), draw(kv_heads)), gradient
        self.cotangent = torch.randn(1, heads, seq, head_dim, device=device())

    def __call__(self) -> None:
        attend = torch.nn.functional.scaled_dot_product_attention
        with torch.set_grad_enabled(self.gradient):
            output = attend(*self.inputs, is_causal=True, enable_gqa=True)
        if self.gradient:
            torch.autograd.grad(output, self.inputs, self.cotangent)
        if device() == "cuda":
            torch.cuda.synchronize()
