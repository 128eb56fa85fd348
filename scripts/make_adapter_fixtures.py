"""Make the reference fixtures of adapters: the files that PEFT saves, and the logits and gradients in PyTorch.

    python -m scripts.make_adapter_fixtures                                    # all of tests/fixtures/adapters
    python -m scripts.make_adapter_fixtures --only dora oft --out /tmp/cases   # some, elsewhere
    python -m scripts.make_adapter_fixtures --only peft --out docs/fixtures    # base and adapter of the tutorial

It needs `pip install torch==2.13.0 transformers==5.23.0 peft==0.21.2 safetensors==0.8.0 numpy==2.4.6 tyro` and Python
3.11, which made the committed files on one CPU. The same versions on the same CPU give the same bytes.

The bases are the models of tests/fixtures/models, made by `make_fixtures.py`, cast to float32. Noise is added to the
trainable parameters of an adapter. A case has adapter_config.json and adapter_model.safetensors as PEFT saves them;
meta.json; and expected.safetensors, computed after PEFT has loaded these files again:

    input_ids, logits, loss      a forward pass, and the next-token loss
    logits_merged                after `merge_and_unload`, if PEFT supports it
    grad.NAME                    some gradients of that loss, by tensor name in the adapter's file
"""

import contextlib
import importlib
import json
import re
import shutil
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from scripts.fixtures import write_cases
from scripts.make_fixtures import FIRST, distance, load, safetensors, torch, transformers

try:
    peft: Any = importlib.import_module("peft")
except ImportError:
    peft = None

ROOT = Path(__file__).parents[1]
BASES = ROOT / "tests/fixtures/models"
ROWS, LENGTH = 2, 8
TOLERANCE = 1e-5
STORED_GRADIENTS = re.compile(r"\.0\.|lm_head|embed_tokens|\.norm\.|\bwte\b|vera_")
"""Tensor names whose gradients are stored: those of the first layer, and of modules outside the layers."""


@dataclass(frozen=True)
class Case:
    """An adapter: its base model, the class of its PEFT config, a note, and the options of the config."""

    base: str
    config: str
    note: str
    options: dict[str, Any]
    embeddings: str | bool = "auto"
    """PEFT's option `save_embedding_layers`."""
    ranks: dict[str, list[bool]] = field(default_factory=dict)
    """For AdaLoRA: the ranks of each matrix that its allocator keeps."""
    merges: bool = True
    """False if PEFT would merge into embeddings that are tied to the head."""


QV = {"target_modules": ["q_proj", "v_proj"]}
ALL = {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]}
ADALORA = {"init_r": 4, "lora_alpha": 6, "total_step": 10}
CASES = {
    "lora": Case("llama", "LoraConfig", "queries and values", QV | {"r": 2, "lora_alpha": 3}),
    "lora_patterns": Case(
        "llama", "LoraConfig", "rank_pattern and alpha_pattern, scaled by the root of the rank",
        {"target_modules": ["q_proj", "o_proj", "down_proj"], "r": 2, "lora_alpha": 4, "use_rslora": True}
        | {"rank_pattern": {"layers.1.self_attn.q_proj": 3, "down_proj": 1}, "alpha_pattern": {"o_proj": 5}},
    ),
    "lora_gpt2": Case(
        "gpt2", "LoraConfig", "q, k and v fused, weights stored (in, out)",
        {"target_modules": ["c_attn", "mlp.c_proj"], "r": 2, "lora_alpha": 4, "fan_in_fan_out": True},
    ),
    "lora_mamba": Case(
        "mamba", "LoraConfig", "the input projection of a recurrence", {"target_modules": ["in_proj"], "r": 2}
    ),
    "lora_embedding": Case(
        "mistral", "LoraConfig", "embeddings and queries; PEFT saves the embeddings too",
        {"target_modules": ["embed_tokens", "q_proj"], "r": 2, "lora_alpha": 4},
    ),
    "lora_embedding_alone": Case(
        "llama", "LoraConfig", "tied embeddings, where the head keeps the original; the embeddings are not saved",
        {"target_modules": ["embed_tokens"], "r": 2, "lora_alpha": 4}, embeddings=False, merges=False,
    ),
    "lora_tied_embedding": Case(
        "llama", "LoraConfig", "tied embeddings that the head follows, and queries; PEFT saves the head's copies too",
        {"target_modules": ["embed_tokens", "q_proj"], "r": 2, "lora_alpha": 4, "ensure_weight_tying": True},
        merges=False,
    ),
    "lora_tied_saved_embedding": Case(
        "llama", "LoraConfig", "tied embeddings trained in full, which the head follows",
        QV | {"r": 2, "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ),
    "lora_head": Case("mistral", "LoraConfig", "the head; PEFT saves it too", {"target_modules": ["lm_head"], "r": 2}),
    "lora_bias_only": Case("qwen2", "LoraConfig", "biases of the target modules", QV | {"r": 2, "bias": "lora_only"}),
    "lora_bias_all": Case(
        "gpt2", "LoraConfig", "all biases of the base, including those of norms",
        {"target_modules": ["c_attn"], "r": 2, "bias": "all", "fan_in_fan_out": True},
    ),
    "lora_saved_head": Case(
        "mistral", "LoraConfig", "a head trained in full", QV | {"r": 2, "modules_to_save": ["lm_head"]}
    ),
    "lora_saved_norms": Case(
        "mistral", "LoraConfig", "the final norm and those before attention trained in full",
        QV | {"r": 2, "modules_to_save": ["input_layernorm", "model.norm"]},
    ),
    "lora_saved_embedding": Case(
        "mistral", "LoraConfig", "embeddings trained in full", QV | {"r": 2, "modules_to_save": ["embed_tokens"]}
    ),
    "lora_experts": Case(
        "mixtral", "LoraConfig", "the down projection of each expert, by parameter name",
        {"target_modules": [], "target_parameters": ["mlp.experts.down_proj"], "r": 2},
    ),
    "lora_experts_interleaved": Case(
        "gpt_oss", "LoraConfig", "queries, and both projections of each expert, by parameter name",
        {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"], "r": 2},
    ),
    "dora": Case("llama", "LoraConfig", "all linear layers", ALL | {"r": 2, "lora_alpha": 3, "use_dora": True}),
    "dora_bias_only": Case(
        "qwen2", "LoraConfig", "biases of the target modules", QV | {"r": 2, "use_dora": True, "bias": "lora_only"}
    ),
    "ia3": Case(
        "llama", "IA3Config", "keys, values and inner activations",
        {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    ),
    "vera": Case("llama", "VeraConfig", "random factors sliced to different sizes", QV | {"r": 3}),
    "loha": Case(
        "llama", "LoHaConfig", "queries and output projections",
        {"target_modules": ["q_proj", "o_proj"], "r": 2, "alpha": 3},
    ),
    "lokr": Case(
        "llama", "LoKrConfig", "both factors low-rank, factor 4",
        {"target_modules": ["q_proj", "down_proj"], "r": 1, "alpha": 2, "decompose_both": True, "decompose_factor": 4},
    ),
    "oft": Case(
        "llama", "OFTConfig", "blocks of 4, which cross the boundaries of heads of 6", ALL | {"oft_block_size": 4}
    ),
    "oft_shared": Case(
        "gpt_neox", "OFTConfig", "two blocks with shared parameters, exactly orthogonal; q, k and v fused",
        {"target_modules": ["query_key_value", "dense_h_to_4h"], "r": 2, "oft_block_size": 0, "block_share": True}
        | {"use_cayley_neumann": False},
    ),
    "adalora": Case("llama", "AdaLoraConfig", "queries and values", QV | ADALORA),
    "adalora_allocated": Case(
        "llama", "AdaLoraConfig", "some ranks of 4 kept, none in one matrix", QV | ADALORA,
        ranks={
            "model.layers.0.self_attn.q_proj": [True, False, True, True],
            "model.layers.0.self_attn.v_proj": [False, False, True, False],
            "model.layers.1.self_attn.q_proj": [True, True, True, True],
            "model.layers.1.self_attn.v_proj": [False, False, False, False],
        },
    ),
    "peft": Case("qwen2", "LoraConfig", "the tutorial's adapter", QV | {"r": 4, "lora_alpha": 8}),
}  # fmt: skip
PAGES = ("peft",)  # of the documentation: made only when named, and with a copy of the base


def main(*, out: Path = ROOT / "tests/fixtures/adapters", only: tuple[str, ...] = ()) -> None:
    """Make the cases, and print the size of each and PEFT's own errors.

    Args:
        out: Folder to write one folder per case to.
        only: Names of cases; by default all except that of the documentation.
    """
    if peft is None or transformers is None:
        raise SystemExit("This needs PEFT: pip install torch==2.13.0 transformers==5.23.0 peft==0.21.2")
    write_cases(make_case, only or [name for name in CASES if name not in PAGES], out, torch, transformers)


def make_case(name: str, folder: Path) -> dict[str, float]:
    """Write one case. Return the largest differences of logits: reloaded and merged against saved, and saved against
    the base."""
    case, seed = CASES[name], zlib.crc32(name.encode()) % 100_000
    shutil.rmtree(folder, ignore_errors=True)
    base = BASES / case.base
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(FIRST, load(base).config.vocab_size, (ROWS, LENGTH), generator=random)
    torch.manual_seed(seed)
    with ignored_warnings():
        model = peft.get_peft_model(load(base), build_config(case)).eval()
        with torch.no_grad():
            add_noise(model, seed)
            for module, kept in case.ranks.items():
                model.get_submodule(f"base_model.model.{module}").lora_E["default"][~torch.tensor(kept)] = 0
            before, saved = load(base)(input_ids=ids).logits, model(input_ids=ids).logits
        if case.ranks:
            pattern = {f"{module}.lora_E.default": kept for module, kept in case.ranks.items()}
            model.peft_config["default"].rank_pattern = pattern
        model.save_pretrained(folder, save_embedding_layers=case.embeddings)
        reloaded = peft.PeftModel.from_pretrained(load(base), folder, is_trainable=True).eval()
        expected = compute_expected(reloaded, ids, case.embeddings)
        checks = {"reread": distance(expected["logits"], saved), "effect": distance(saved, before)}
        if case.merges:
            with torch.no_grad():
                expected["logits_merged"] = reloaded.merge_and_unload()(input_ids=ids).logits
            checks["merged"] = distance(expected["logits_merged"], saved)
    if max(checks.get("merged", 0), checks["reread"]) > TOLERANCE * float(saved.abs().max()) or checks["effect"] < 0.05:
        raise RuntimeError(
            f"{name}: PEFT's reloaded or merged adapter differs from the saved one, or has almost no effect: {checks}"
        )

    (folder / "README.md").unlink()
    config = json.loads((folder / "adapter_config.json").read_text())
    for key in ("target_modules", "target_parameters", "modules_to_save", "feedforward_modules"):
        if isinstance(config.get(key), list):
            config[key] = sorted(config[key])  # PEFT stores sets, whose order differs between processes
    config["base_model_name_or_path"] = case.base
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1) + "\n")
    versions = {module.__name__: module.__version__ for module in (torch, transformers, peft)}
    meta = {"name": name, "base": case.base, "note": case.note, "seed": seed, "checks": checks}
    meta["versions"] = versions | {"cpu": torch.backends.cpu.get_cpu_capability()}
    safetensors.save_file(expected, folder / "expected.safetensors", metadata={"format": "pt"})
    (folder / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
    if name in PAGES:
        (folder / "base").mkdir()
        for file in ("config.json", "model.safetensors"):
            shutil.copyfile(base / file, folder / "base" / file)
    return checks


@contextlib.contextmanager
def ignored_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def build_config(case: Case) -> Any:
    return getattr(peft, case.config)(task_type="CAUSAL_LM", **case.options)


def add_noise(model: Any, seed: int) -> None:
    """Add noise to all trainable parameters, in the order of their names."""
    random = np.random.default_rng(seed)
    for _, weight in sorted(model.named_parameters()):
        if weight.requires_grad:
            weight.add_(0.2 * torch.from_numpy(random.standard_normal(tuple(weight.shape), dtype=np.float32)))


def compute_expected(model: Any, ids: Any, embeddings: str | bool) -> dict[str, Any]:
    """Compute the logits, loss and gradients of a loaded adapter."""
    logits = model(input_ids=ids).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    trainable = [weight for weight in model.parameters() if weight.requires_grad and weight.numel()]
    gradients: dict[int, Any] = {}
    for weight, gradient in zip(trainable, torch.autograd.grad(loss, trainable, allow_unused=True), strict=True):
        if gradient is not None:  # PEFT's head shares the memory of a tied embedding's factors, transposed
            known = gradients.get(weight.data_ptr())
            gradients[weight.data_ptr()] = gradient if known is None else known + match_shape(gradient, known)
    expected = {"input_ids": ids, "logits": logits.detach(), "loss": loss.detach()}
    for name, weight in peft.get_peft_model_state_dict(model, save_embedding_layers=embeddings).items():
        gradient = gradients.get(weight.data_ptr()) if weight.numel() else None
        if gradient is not None and STORED_GRADIENTS.search(name):
            expected[f"grad.{name}"] = match_shape(gradient, weight)
    return {name: value.clone().contiguous() for name, value in expected.items()}


def match_shape(gradient: Any, like: Any) -> Any:
    """Return a gradient in the shape of `like`, which has the same numbers, or is its transpose."""
    is_transposed = gradient.shape != like.shape and gradient.shape == like.shape[::-1]
    return gradient.T if is_transposed else gradient.reshape(like.shape)


if __name__ == "__main__":
    tyro.cli(main)
