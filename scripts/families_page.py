"""Write the page of families: what they are, the parts of their layers, and the published sizes."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import jax

from zoo.cli.families import summarize_family
from zoo.layers import (
    MLSTM,
    RGLRU,
    RWKV4,
    RWKV6,
    RWKV7,
    AlibiAttention,
    CompressedAttention,
    DifferentialAttention,
    DoubleGatedConvolution,
    ForgettingAttention,
    GroupedGatedDeltaNet,
    KimiDeltaAttention,
    LatentAttention,
    Mamba,
    Mamba2,
    Mamba3,
    MixtureOfBlockAttention,
    MixtureOfExperts,
    NativeSparseAttention,
    SparseLatentAttention,
)
from zoo.layers.attention.relative_bias import RelativeBiasAttention
from zoo.layers.embedding import SinusoidalPositionEmbedding
from zoo.layers.encoders.bidirectional_attention import BidirectionalAttention
from zoo.layers.recurrent.base import AbstractRecurrence
from zoo.models import Decoder, Encoder, ImageEncoder
from zoo.models.blocks import ParallelBlock
from zoo.models.encoders.audio import AudioEncoder
from zoo.models.hf.builders import find_activation_name
from zoo.models.hf.config import read_config
from zoo.models.hf.families import FAMILIES
from zoo.models.hf.families.falcon_h1_layers import SideBySide
from zoo.models.hf.families.gpt_oss_layers import ClampedGatedMLP
from zoo.models.hf.families.jetmoe_layers import MixtureOfAttention, OutputBias
from zoo.models.hf.families.mimo_v2_flash_layers import ValueScaledAttention
from zoo.models.hf.families.zamba_layers import MultiHeadMamba, SharingBlock
from zoo.models.hf.not_read import REFUSED_VARIANTS, list_reasons
from zoo.models.hf.spec import Config, Family
from zoo.models.hf.support import FamilySupport, families
from zoo.models.presets.published import PRESETS, Preset
from zoo.models.stack import Stack

TESTS = Path(__file__).parents[1] / "tests"
QUANTIZED = {
    "deepseek_v3": ["fp8"],
    "gpt_oss": ["mxfp4"],
    "llama": ["fp8", "gptq", "awq", "compressed-tensors", "bitsandbytes"],
    "qwen2": ["awq"],
    "qwen3_moe": ["fp8"],
}
"""Formats by the family of their cases."""
REQUIRED_KEYS = {
    "llada": {"block_type": "llama", "layer_norm_type": "rms", "rope": True, "activation_type": "silu"},
    "qwen4_exp_text": dict.fromkeys(
        ("indexer_n_heads", "indexer_head_dim", "indexer_budget", "indexer_compress_ratio"), 64
    ),
}
"""Keys by family without which its default config is refused."""
HELD_BY_FORMULA = ("dream", "llada")
"""Families without a class in transformers: tests hold them to the formula, in NumPy."""
LATENT_OPTIONS = {"bailing_hybrid": " with a gate per head", "kimi_linear": " without positions"}
"""Words on the attention beside Kimi Delta Attention, by family."""
WORDS_BESIDE_DELTA_RULES = {
    "lara_mini": "grouped-query attention with QK norm, in a window with RoPE or full without, in other layers",
    "olmo_hybrid": "grouped-query attention in every fourth layer",
    "qwen4_exp_text": "gated grouped-query attention to the top blocks of an indexer in every fourth layer; gated "
    "residual streams, memories of n-grams",
}
"""Words on the attention beside the gated delta rule, by family, where it has no gate."""
OTHER_MIXERS = {
    "lfm2": ["DoubleGatedConvolution"],
    "lfm2_moe": ["DoubleGatedConvolution"],
    "minimax": ["Lightning"],
}
"""Mixers of layers beside attention, by family: checkpoints name the layers, and the default config has attention
first."""


LETTERS = {"mamba": "M", "linear_attention": "L", "full_attention": "A", "attention": "A", "hybrid": "H"}
PERIODS: dict[str, tuple[str, Any, dict[str, Any], float]] = {
    "granitemoehybrid": ("layer_types", [*["mamba"] * 5, "attention", *["mamba"] * 4], {}, 1.8),
    "qwen3_next": ("layer_types", [*["linear_attention"] * 3, "full_attention"], {}, 1.7),
    "nemotron_h": ("hybrid_override_pattern", "M-M-M-M-M*-", {}, 1.8),
    "zamba2": ("layers_block_type", [*["mamba"] * 5, "hybrid"] * 2, {"num_mem_blocks": 2}, 1.8),
}
"""By family: the key of its layers, their period, further keys, and the CPU time of the first step of the deep model
over that of one period."""
MEASURED_ON = "two cores of an AMD EPYC"


def build_families_page(note: str) -> str:
    """List the families of checkpoints, the parts of their layers, and the published sizes."""
    rows = [f"| `{name}` | {' | '.join(describe_parts(f))} |" for name, f in FAMILIES.items()]
    by_size = sorted(PRESETS.items(), key=lambda item: (item[1].family, item[1].parameters, item[0]))
    summaries = [f"- `{name}`: {summarize_family(name)}" for name in FAMILIES]
    return "\n".join(
        [
            f"# Families\n\n{note}The model types that `zoo.load` reads and `zoo.save` writes, by the "
            "`model_type` of a `config.json`. [Port a model](port.md) adds one.\n",
            '<input class="filter" type="search" placeholder="Filter: qwen3, sliding window, latent" '
            'aria-label="Filter the families of this page">\n',
            "## Layers\n",
            "With the default config of each family; a checkpoint's config may change the details. Grouped-query "
            "attention (GQA) shares each key and value head among several query heads; multi-head latent attention "
            "(MLA) caches one latent vector per token instead.\n",
            "| family | mixer | norm | feed-forward | head |",
            "|---|---|---|---|---|",
            *rows,
            "\n## Tested\n",
            "Tests compare a small checkpoint of each family with PyTorch, in transformers or flash-linear-attention "
            "(fla): activations, gradients, padding, and files bit for bit. `zoo.families()` returns this table. "
            "*Mesh*: a training step on data 2 x fsdp 2 x tensor 2, "
            "of packed rows where the model takes them, equals one on one device. *Adapters*: LoRA around every linear "
            "layer does too. *Decoding*: greedy tokens with caches are PyTorch's. *Quantized*: formats with a case of "
            "the family; the [same code](quantized.md#what-is-read) reads them for the others. The classes of "
            f"{' and '.join(f'`{name}`' for name in HELD_BY_FORMULA)} come with their files: tests compare their "
            "logits with the formula.\n",
            "| family | class in transformers or fla | cases | mesh | adapters | decoding | quantized |",
            "|---|---|--:|---|---|---|---|",
            *(
                f"| `{name}` | `{FAMILIES[name].architecture}` | {format_support(support)} |"
                for name, support in families().items()
            ),
            "\n## Compile time of hybrids\n",
            f"{len(FAMILIES)} families are read. A stack compiles the blocks of a repeating pattern once, and equal "
            "neighbors in it once: a deep model compiles as many blocks as one period of its layers. First step: CPU "
            "time to compile and run loss and gradient, of the deep model over that of one period, at small sizes; "
            f"median of three, on {MEASURED_ON}.\n",
            "| family | period | blocks of a period | layers | blocks of all | first step |",
            "|---|---|--:|--:|--:|--:|",
            *(describe_depth(name, pattern) for name, pattern in PERIODS.items()),
            "\n## What each is\n",
            *summaries,
            "\n## Not read yet\n",
            "`zoo.load` refuses these by name, with the reason.\n",
            *(f"- {', '.join(f'`{name}`' for name in names)}: {reason}." for names, reason in list_reasons()),
            *(f"- {name}: {reason}" for name, reason in REFUSED_VARIANTS.items()),
            "\n## Published sizes\n",
            '`zoo.models.preset("llama3-8b", key=key)` initializes a model of a published size.\n',
            "| preset | family | parameters | active per token | config from |",
            "|---|---|--:|--:|---|",
            *(
                f"| `{name}` | `{p.family}` | {p.parameters:,} | {format_active(p)} | {p.source} |"
                for name, p in by_size
            ),
            "",
        ]
    )


def describe_depth(name: str, pattern: tuple[str, Any, dict[str, Any], float]) -> str:
    """Describe the compiled blocks of one period of a hybrid, and of as many as reach 48 layers."""
    key, period, options, ratio = pattern
    counts = []
    for periods in (1, -(-48 // len(period))):
        layers = period * periods
        family = FAMILIES[name]
        config = read_config(family, {**options, key: layers, "num_hidden_layers": len(layers)})
        model = eqx.filter_eval_shape(family.build, config, key=jax.random.key(0))
        counts.append((len(layers), count_compiled_blocks(model.stack)))
    (_, once), (depth, compiled) = counts
    letters = "".join(LETTERS.get(kind, str(kind)) for kind in period)
    return f"| `{name}` | `{letters}` | {once} | {depth} | {compiled} | {ratio} |"


def count_compiled_blocks(stack: Stack) -> int:
    """Count the blocks that a scan over the layers compiles."""
    return sum(len(segment.blocks) for segment in stack.segments)


def format_support(support: FamilySupport) -> str:
    mark = lambda held: "yes" if held else ""
    flags = map(mark, (support.mesh, support.adapters, support.decoding))
    return " | ".join([str(len(support.cases)), *flags, ", ".join(support.quantized)])


def build_support() -> str:
    """Build the table of what is tested of each family: from the fixtures, with which every test of them runs, and from
    the families that quantized files are tested with."""
    kinds = ("models", "encoders", "encoder_decoders", "image_text", "block_denoisers")
    found = {kind: find_cases(TESTS / "fixtures" / kind) for kind in kinds}
    rows = {}
    for name in FAMILIES:
        by_kind = {kind: found[kind].get(name, []) for kind in kinds}
        cases = [case for listed in by_kind.values() for case in listed]
        is_held = bool(cases) or name in HELD_BY_FORMULA
        held = {"mesh": is_held, "adapters": is_held}
        held["decoding"] = bool(by_kind["models"] or by_kind["encoder_decoders"] or by_kind["image_text"])
        rows[name] = {"cases": cases, **held, "quantized": QUANTIZED.get(name, [])}
    return json.dumps(rows, indent=1) + "\n"


def find_cases(folder: Path) -> dict[str, list[str]]:
    """Return the names of the cases in a folder, by `model_type`."""
    found: dict[str, list[str]] = {}
    for config in sorted(folder.glob("*/config.json")):
        family = json.loads(config.read_text(encoding="utf-8"))["model_type"]
        found.setdefault(family, []).append(config.parent.name)
    return found


def describe_parts(family: Family) -> tuple[str, str, str, str]:
    """Describe the mixer, norm, feed-forward and head of a family.

    They are read off the model of its default config; keys without a default are those of its first published size.
    """
    if "canvas_length" in family.defaults:
        mixer = "of prompts: as `gemma4_text`; a canvas attends to the prompt, and to itself in both directions"
        return mixer, "`RMSNorm`", "`MixtureBesideMLP`, gelu_pytorch_tanh", "tied"
    if family.defaults.keys() & {"image_token_id", "image_token_index"}:
        return describe_image_text(family)
    if "vision_config" in family.defaults:
        return describe_towers(family)
    if "decoder_start_token_id" in family.defaults or "encoder" in family.defaults:
        return describe_encoder_decoder(family)
    published = next((preset.config for preset in PRESETS.values() if preset.family == family.name), {})
    absent = [key for key, value in read_config(family, {}).items() if value is None]
    given = {key: published[key] for key in absent if key in published}
    config = read_config(family, {**given, **REQUIRED_KEYS.get(family.name, {})})
    # enough for a mixture of experts after the dense layers, and too few to share keys among the last ones
    depth = config["num_hidden_layers"] if "num_mem_blocks" in config else 4  # Zamba 2 has a default for one depth
    small = Config({**config, "num_hidden_layers": depth, "num_kv_shared_layers": 0})

    def build(key):
        model = family.build(small, key=key)
        return model, tuple(model.stack.iter_blocks())

    model, blocks = eqx.filter_eval_shape(build, jax.random.key(0))
    block, last = blocks[0], blocks[-1]
    mixer = block.mixer
    shared = model.stack.shared
    calls_shared = any(isinstance(x, SharingBlock) for x in blocks)
    if calls_shared:
        words = [*describe_recurrence(mixer), "before it, in some layers, a Transformer layer that they share"]
    elif isinstance(mixer, SparseLatentAttention):
        words = [*describe_latents(mixer.attention), "the top keys of an indexer"]
    elif isinstance(mixer, LatentAttention):
        words = describe_latents(mixer)
    elif isinstance(mixer, CompressedAttention):
        words = ["one key for all heads, of a window and of compressed blocks, all or the top of an indexer"]
        words += [f"RoPE on {mixer.rotary.dim} of {mixer.head_dim} features", "sinks", "streams mixed by mHC"]
    elif isinstance(mixer, Mamba | Mamba2 | RWKV4):
        words = describe_recurrence(mixer) + ["attention in some layers"] * ("num_attention_heads" in config)
    elif isinstance(mixer, SideBySide):
        recurrence = ", ".join(describe_recurrence(mixer.recurrent))
        words = [*describe_attention(mixer.attention, config), f"beside {recurrence}"]
    elif isinstance(mixer, MixtureOfAttention):
        experts = f"{mixer.router.scores.out_size} experts of queries and outputs"
        words = [f"grouped-query attention, top-{mixer.router.top} of {experts}", "RoPE"]
    elif isinstance(mixer, DoubleGatedConvolution):
        words = [
            f"`{type(mixer).__name__}` of width {mixer.convolution.width}",
            "gated grouped-query attention with QK norm, full or in a window, in other layers",
        ]
    elif isinstance(mixer, MLSTM):
        words = [
            f"`{type(mixer).__name__}`",
            f"keys of {mixer.projections.key_dim}, values of {mixer.projections.value_dim}",
        ]
    elif isinstance(mixer, KimiDeltaAttention) and family.name in LATENT_OPTIONS:
        words = [
            f"`{type(mixer).__name__}`",
            f"multi-head latent attention{LATENT_OPTIONS[family.name]} in other layers",
        ]
    elif isinstance(mixer, GroupedGatedDeltaNet):
        gated = "gated grouped-query attention in every fourth layer"
        words = [f"`{type(mixer).__name__}`", WORDS_BESIDE_DELTA_RULES.get(family.name, gated)]
    elif isinstance(mixer, RGLRU):
        words = [
            f"`{type(mixer).__name__}`",
            f"convolution width {mixer.convolution.width}",
            "grouped-query attention in a window, RoPE on 50% of each head, in every third layer",
        ]
    elif isinstance(mixer, AbstractRecurrence | RWKV6 | RWKV7 | Mamba3):
        words = [f"`{type(mixer).__name__}`"] + ["attention in other layers, if a file lists some"] * ("attn" in config)
    elif isinstance(mixer, ForgettingAttention | MixtureOfBlockAttention | NativeSparseAttention):
        words = [f"`{type(mixer).__name__}`"] + ["RoPE"] * (mixer.rotary is not None)
    else:
        words = describe_attention(mixer, config, positions=describe_positions(model))
        words += [f"`{name}` in other layers" for name in OTHER_MIXERS.get(family.name, ())]
        words += ["all layers with the same parameters"] * (len(shared) == 1)
    norm, ffn = type(block.mixer_norm).__name__, getattr(last, "ffn", None)
    wiring = ", parallel to the mixer" if isinstance(block, ParallelBlock) else ""
    if calls_shared:
        ffn, wiring = shared[0].ffn, ", in the shared layer"
    activation = f", {config['hidden_act']}" if "hidden_act" in config else ""
    feed_forward = "none" if ffn is None else f"`{type(ffn).__name__}`{activation}{wiring}"
    if isinstance(ffn, MixtureOfExperts):
        feed_forward = ", ".join([feed_forward, *describe_mixture(ffn), *describe_dense_layers(blocks)])
    return ", ".join(words), f"`{norm}`", feed_forward, describe_head(model)


def describe_towers(family: Family) -> tuple[str, str, str, str]:
    """Describe the layers of both towers, and how they are pooled."""

    def build(key):
        model = family.build(read_config(family, {}), key=key)
        return [(tower, next(tower.stack.iter_blocks())) for tower in (model.text, model.image)]

    towers = eqx.filter_eval_shape(build, jax.random.key(0))
    mixers = [", ".join(describe_attention(block.mixer, Config())) for _, block in towers]
    names = ("texts", "images")
    mixer = "; ".join(f"of {name}: {words}" for name, words in zip(names, mixers, strict=True))
    activations = dict.fromkeys(find_activation_name(block.ffn.activation) for _, block in towers)
    poolers = " and ".join(f"`{type(tower.head.pooler).__name__}`" for tower, _ in towers)
    block = towers[0][1]
    feed_forward = f"`{type(block.ffn).__name__}`, {' and '.join(activations)}"
    return mixer, f"`{type(block.mixer_norm).__name__}`", feed_forward, poolers


def describe_image_text(family: Family) -> tuple[str, str, str, str]:
    """Describe the encoder of images and the projector; the language model has a row of its own."""

    def build(key):
        model = family.build(read_config(family, {}), key=key)
        return model, next(model.tower.stack.iter_blocks())

    model, block = eqx.filter_eval_shape(build, jax.random.key(0))
    block = getattr(block, "block", block)
    words = ", ".join(describe_attention(block.mixer, Config()))
    text, _ = family.build.__self__.read_text(read_config(family, {}))
    mixer = f"of images: {words}; of texts: as `{text.name}`, or the family of `text_config`"
    feed_forward = f"`{type(block.ffn).__name__}`, {find_activation_name(block.ffn.activation)}"
    return mixer, f"`{type(block.mixer_norm).__name__}`", feed_forward, f"`{type(model.projector).__name__}`"


def describe_encoder_decoder(family: Family) -> tuple[str, str, str, str]:
    """Describe the layers of an encoder and of its decoder."""

    def build(key):
        model = family.build(read_config(family, {}), key=key)
        return model, [next(part.stack.iter_blocks()) for part in (model.encoder, model.decoder)]

    model, blocks = eqx.filter_eval_shape(build, jax.random.key(0))
    own = [
        describe_attention(block.mixer, Config(), positions=describe_positions(part))
        for part, block in zip((model.encoder, model.decoder), blocks, strict=True)
    ]
    shared = [word for word in own[0] if word in own[1]]

    mixer = f"{', '.join(shared)}; the encoder in both directions, the decoder causal, with cross-attention"
    if isinstance(model.encoder, AudioEncoder):
        mixer = f"{mixer}; of log-mel features through two convolutions"
    ffn = blocks[0].ffn
    feed_forward = f"`{type(ffn).__name__}`, {find_activation_name(ffn.activation)}"
    return mixer, f"`{type(blocks[0].mixer_norm).__name__}`", feed_forward, describe_head(model.decoder)


def describe_head(model: Decoder | Encoder | ImageEncoder) -> str:
    if isinstance(model, Decoder):
        return "tied" if model.head is None else "untied"
    return f"`{type(model.head).__name__}`"


def format_active(preset: Preset) -> str:
    return "" if preset.active_parameters is None else f"{preset.active_parameters / 1e9:g} billion"


def describe_mixture(ffn: MixtureOfExperts) -> list[str]:
    router = ffn.router
    words = [f"top-{router.top} of {router.scores.out_size} experts, `{type(router).__name__}`"]
    words += ["clamped SwiGLU"] * isinstance(ffn.experts, ClampedGatedMLP)
    if isinstance(ffn.shared, OutputBias):
        return [*words, "bias of the output"]
    return words + [f"{'gated ' if ffn.shared_gate else ''}shared expert"] * (ffn.shared is not None)


def describe_dense_layers(blocks: Sequence[Any]) -> list[str]:
    """Say where the layers without a mixture are, in a model of which the last one has one."""
    sparse = [isinstance(getattr(block, "ffn", None), MixtureOfExperts) for block in blocks]
    if all(sparse):
        return []
    return ["dense layers first" if sparse == sorted(sparse) else "dense layers between"]


def describe_positions(model: Decoder | Encoder | ImageEncoder) -> str:
    if isinstance(getattr(model, "position_embedding", None), SinusoidalPositionEmbedding):
        return "sinusoidal positional embeddings"
    return "learned positional embeddings"


def describe_attention(mixer: Any, config: Config, *, positions: str = "learned positional embeddings") -> list[str]:
    """Describe softmax attention of any class, by the fields that it has. `positions`: of a model without RoPE."""
    mixer, chunk = getattr(mixer, "attention", mixer), getattr(mixer, "chunk", None)
    field = lambda name: getattr(mixer, name, None)
    words = ["grouped-query attention" if "num_key_value_heads" in config else "multi-head attention"]
    if isinstance(mixer, DifferentialAttention):
        words = [f"`{type(mixer).__name__}`"]
    words += ["in both directions"] * isinstance(mixer, BidirectionalAttention | RelativeBiasAttention)
    if isinstance(mixer, AlibiAttention):
        words.append("ALiBi")
    elif isinstance(mixer, RelativeBiasAttention):
        words += [positions, "biases of relative position"]
    elif mixer.rotary is None:
        words.append(positions)
    else:
        fraction = mixer.rotary.dim / mixer.head_dim
        if isinstance(mixer, DifferentialAttention):
            fraction *= 2  # of half a head
        words.append("RoPE" if fraction == 1 else f"RoPE on {fraction:.0%} of each head")
    words += [f"QK norm{' over all heads' * bool(field('norm_over_heads'))}"] * (field("query_norm") is not None)
    words += ["biases"] * (getattr(mixer.query, "bias", None) is not None)
    words += ["attention sinks"] * (field("sinks") is not None)
    words += ["output gate"] * (field("gate") is not None)
    words += ["scaled values of another size"] * isinstance(mixer, ValueScaledAttention)
    words += ["within chunks"] * (chunk is not None)
    return words + ["sliding window"] * ("sliding_window" in config)


def describe_recurrence(mixer: Mamba | Mamba2 | MultiHeadMamba | RWKV4) -> list[str]:
    if isinstance(mixer, MultiHeadMamba):
        heads, _, state = mixer.heads.A_log.shape
        words = [f"{heads} heads", f"state of {state} per channel", f"convolution width {mixer.convolution.width}"]
        return [f"`{type(mixer).__name__}`", *words]
    if isinstance(mixer, RWKV4):
        return [f"`{type(mixer).__name__}`", "decaying average"]
    if isinstance(mixer, Mamba2):
        groups = mixer.B.out_size // mixer.state_dim
        words = [f"state of {mixer.state_dim} per channel", f"{groups} group{'s' * (groups != 1)}"]
        return [f"`{type(mixer).__name__}`", *words, f"convolution width {mixer.x_convolution.width}"]
    words = [f"state of {mixer.A_log.shape[1]} per channel", f"convolution width {mixer.convolution.width}"]
    return [f"`{type(mixer).__name__}`", *words, *["norms of dt, B and C"] * (mixer.dt_norm is not None)]


def describe_latents(mixer: LatentAttention) -> list[str]:
    fraction = mixer.rotary.dim / (mixer.head_dim + mixer.rotary.dim)
    words = ["multi-head latent attention", f"RoPE on {fraction:.0%} of each head"]
    return words + ["latent queries"] * (mixer.query is None)
