"""Write the reference cases of decoders that score texts: tiny random `XForSequenceClassification`, with its scores.

    python scripts/make_score_fixtures.py                          # all of tests/fixtures/scores
    python scripts/make_score_fixtures.py --only gpt2 --out /tmp/cases

Needs what scripts/make_fixtures.py needs. A case has two texts, the second of them padded:

    right.input_ids, right.attention_mask, right.logits      padding on the right
    left.input_ids, left.attention_mask, left.logits         padding on the left
    labels, loss                                             of the rows with padding on the right
    grad.NAME                                                of `loss`, by the names in files
"""

import importlib
import inspect
import json
import shutil
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from scripts.fixtures import write_cases

try:
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    safetensors: Any = importlib.import_module("safetensors.torch")
    loading: Any = importlib.import_module("transformers.core_model_loading")
except ImportError:
    torch = transformers = safetensors = loading = None

PADDING = 0
SIZES = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "max_position_embeddings": 32}
GROUPED = SIZES | {"num_key_value_heads": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "norm_topk_prob": True}
OPT = {"vocab_size": 40, "hidden_size": 16, "ffn_dim": 20, "num_hidden_layers": 2, "num_attention_heads": 4}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": ("Gemma2", GROUPED | {"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8}),
    "gpt2": ("GPT2", {"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32}),
    "gpt_neox": ("GPTNeoX", SIZES | {"rotary_pct": 0.5}),
    "llama": ("Llama", GROUPED | {"num_labels": 1}),
    "opt_projected": ("OPT", OPT | {"max_position_embeddings": 32, "word_embed_proj_dim": 12}),
    "qwen3_moe": ("Qwen3Moe", GROUPED | EXPERTS | {"head_dim": 4}),
}
"""Class and config: tied and untied embeddings, learned and rotary positions, experts, and a projection after the last
layer."""


def main(*, out: Path = Path(__file__).parents[1] / "tests/fixtures/scores", only: tuple[str, ...] = ()) -> None:
    """Write the cases; print the size of each.

    Args:
        out: Folder for the cases, one subfolder each.
        only: Names of cases. By default all.
    """
    if transformers is None:
        raise SystemExit("This needs PyTorch and transformers: pip install torch==2.13.0 transformers==5.24.0")
    write_cases(make, only or CASES, out, torch, transformers)


def make(name: str, folder: Path) -> str:
    """Write one case; return its class in transformers."""
    prefix, sizes = CASES[name]
    seed = zlib.crc32(name.encode()) % 100_000
    random = np.random.default_rng(seed)
    kind = getattr(transformers, f"{prefix}ForSequenceClassification")
    shutil.rmtree(folder, ignore_errors=True)
    model = build(kind, {"num_labels": 3, "pad_token_id": PADDING, **sizes}, random, seed)
    model.save_pretrained(folder)
    right = draw_texts(random)
    left = {key: torch.stack([x[0], x[1].roll(3)]) for key, x in right.items()}
    positions = {}
    if "position_ids" in inspect.signature(model.forward).parameters:  # a class counts padding too, unless told
        positions["position_ids"] = (left["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    logits = model(**right, use_cache=False).logits
    labels = torch.from_numpy(random.integers(0, logits.shape[-1], 2))
    loss: Any = -torch.nn.functional.logsigmoid(logits[0] - logits[1]).sum()
    if logits.shape[-1] > 1:
        loss = torch.nn.functional.cross_entropy(logits, labels)
    loss.backward()
    gradients = {key: weight.grad for key, weight in model.named_parameters() if weight.grad is not None}
    gradients = loading.revert_weight_conversion(model, gradients)  # as files name them
    expected = {
        **{f"right.{key}": x for key, x in right.items()},
        **{f"left.{key}": x for key, x in left.items()},
        "right.logits": logits,
        "left.logits": model(**left, **positions, use_cache=False).logits,
        "labels": labels,
        "loss": loss,
        **{f"grad.{key}": x for key, x in gradients.items()},
    }
    tensors = {key: x.detach().clone().contiguous() for key, x in expected.items()}
    safetensors.save_file(tensors, folder / "expected.safetensors")
    meta = {"name": name, "architecture": kind.__name__, "seed": seed}
    (folder / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
    return kind.__name__


def build(kind: Any, config: dict[str, Any], random: np.random.Generator, seed: int) -> Any:
    """Build a model with random weights, of norms and biases too."""
    torch.manual_seed(seed)
    model = kind(kind.config_class(**config)).eval()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    with torch.no_grad():
        for _, weight in sorted(model.named_parameters()):
            draw = torch.from_numpy(random.standard_normal(tuple(weight.shape), dtype=np.float32))
            if weight.ndim == 1:
                weight.add_(0.2 * draw)
            else:
                weight.copy_(0.3 * draw)
    return model


def draw_texts(random: np.random.Generator) -> dict[str, Any]:
    """Return a text of 9 tokens and one of 6."""
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, 6:] = 0
    ids = torch.from_numpy(random.integers(3, 40, (2, 9)))
    return {"input_ids": ids.masked_fill(mask == 0, PADDING), "attention_mask": mask}


if __name__ == "__main__":
    tyro.cli(main)
