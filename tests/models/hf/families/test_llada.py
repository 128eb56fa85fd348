"""LLaDA and Dream, which have no class in transformers: held to the formula in NumPy, with files of random numbers."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.weights.test_families_on_meshes import adapt, compare_meshes, draw_texts
from zoo.weights.safetensors import open_tensors, write_safetensors

VOCAB, EMBED, HEADS, KV_HEADS, MLP, LAYERS, THETA, EPSILON = 24, 16, 4, 2, 20, 3, 50.0, 1e-3
SIZES = {
    "query": (EMBED, EMBED),
    "key": (8, EMBED),
    "value": (8, EMBED),
    "out": (EMBED, EMBED),
    "gate": (MLP, EMBED),
    "up": (MLP, EMBED),
    "down": (EMBED, MLP),
    "norm": (EMBED,),
    "ffn_norm": (EMBED,),
    "query.bias": (EMBED,),
    "key.bias": (8,),
    "value.bias": (8,),
}
LLADA = {
    "model_type": "llada",
    "architectures": ["LLaDAModelLM"],
    "block_type": "llama",
    "layer_norm_type": "rms",
    "rope": True,
    "activation_type": "silu",
    "d_model": EMBED,
    "n_layers": LAYERS,
    "n_heads": HEADS,
    "n_kv_heads": KV_HEADS,
    "mlp_hidden_size": MLP,
    "vocab_size": 22,
    "embedding_size": VOCAB,
    "rms_norm_eps": EPSILON,
    "rope_theta": THETA,
    "weight_tying": False,
    "mask_token_id": 21,
    "alibi": False,
    "alibi_bias_max": 8.0,
    "attention_dropout": 0.0,
    "attention_layer_norm": False,
    "attention_layer_norm_with_affine": True,
    "bias_for_layer_norm": False,
    "block_group_size": 1,
    "embedding_dropout": 0.0,
    "flash_attention": False,
    "include_bias": False,
    "include_qkv_bias": False,
    "init_cutoff_factor": None,
    "init_device": "meta",
    "init_fn": "mitchell",
    "init_std": 0.02,
    "input_emb_norm": False,
    "layer_norm_with_affine": True,
    "max_sequence_length": 4096,
    "mlp_ratio": 4,
    "multi_query_attention": None,
    "precision": "amp_bf16",
    "residual_dropout": 0.0,
    "rope_full_precision": True,
    "scale_logits": False,
    "use_cache": False,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}
DREAM = {
    "model_type": "Dream",
    "architectures": ["DreamModel"],
    "hidden_act": "silu",
    "hidden_size": EMBED,
    "intermediate_size": MLP,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "vocab_size": VOCAB,
    "num_key_value_heads": KV_HEADS,
    "rms_norm_eps": EPSILON,
    "rope_theta": THETA,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "mask_token_id": 21,
    "max_position_embeddings": 131072,
    "sliding_window": None,
    "max_window_layers": 28,
    "use_sliding_window": False,
    "use_mrope": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "use_cache": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "torch_dtype": "float32",
}
LLADA_NAMES = {
    "query": "q_proj",
    "key": "k_proj",
    "value": "v_proj",
    "out": "attn_out",
    "norm": "attn_norm",
    "gate": "ff_proj",
    "up": "up_proj",
    "down": "ff_out",
    "ffn_norm": "ff_norm",
    "embedding": "wte",
    "final_norm": "ln_f",
    "head": "ff_out",
}
DREAM_NAMES = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "out": "self_attn.o_proj",
    "norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "embedding": "model.embed_tokens",
    "final_norm": "model.norm",
    "head": "lm_head",
}
CASES = {
    "llada": (LLADA, LLADA_NAMES, "model.transformer.blocks.", "model.transformer."),
    "dream": (DREAM, DREAM_NAMES, "model.layers.", ""),
}
NAMES = pytest.mark.parametrize("name", CASES)


def draw_weights(name: str) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    shapes = {
        f"{n}.{part}": s for n in range(LAYERS) for part, s in SIZES.items() if name == "dream" or "." not in part
    }
    shapes |= {"embedding": (VOCAB, EMBED), "final_norm": (EMBED,), "head": (VOCAB, EMBED)}
    return {part: (0.4 * random.normal(size=s) + ("norm" in part)).astype(np.float32) for part, s in shapes.items()}


def write_case(directory: Path, name: str, **changes) -> tuple[Path, dict[str, np.ndarray]]:
    config, names, layers, shell = CASES[name]
    weights = draw_weights(name)
    if changes.get("weight_tying") or changes.get("tie_word_embeddings"):
        del weights["head"]

    def rename(part: str) -> str:
        number, _, inner = part.partition(".")
        if not inner:
            return f"{shell}{names[part]}.weight"
        inner, _, kind = inner.partition(".")
        return f"{layers}{number}.{names[inner]}.{kind or 'weight'}"

    write_safetensors(directory / "model.safetensors", {rename(part): x for part, x in weights.items()})
    (directory / "config.json").write_text(json.dumps(config | changes, indent=2, sort_keys=True) + "\n")
    return directory, weights


def compute_logits(w: dict[str, np.ndarray], tokens: np.ndarray) -> np.ndarray:
    """Compute LLaMA's formula without a mask, in float64, for one row."""
    w = {name: x.astype(np.float64) for name, x in w.items()}
    norm = lambda x, weight: x / np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON) * weight
    dim = EMBED // HEADS
    angles = np.arange(len(tokens))[:, None] * THETA ** (-2 * np.arange(dim // 2) / dim)

    def project(x, name, heads, turn=True):
        y = (x @ w[f"{name}"].T + w.get(f"{name}.bias", 0)).reshape(len(tokens), heads, dim)
        if not turn:
            return y
        y1, y2 = np.split(y, 2, axis=-1)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        return np.concatenate([y1 * cos - y2 * sin, y2 * cos + y1 * sin], -1)

    x = w["embedding"][tokens]
    for layer in range(LAYERS):
        y = norm(x, w[f"{layer}.norm"])
        q = project(y, f"{layer}.query", HEADS)
        k, v = project(y, f"{layer}.key", KV_HEADS), project(y, f"{layer}.value", KV_HEADS, turn=False)
        k, v = (np.repeat(z, HEADS // KV_HEADS, axis=1) for z in (k, v))
        chances = np.exp(np.einsum("qhd,khd->hqk", q, k) / np.sqrt(dim))
        mixed = np.einsum("hqk,khd->qhd", chances / chances.sum(-1, keepdims=True), v)
        x = x + mixed.reshape(len(tokens), EMBED) @ w[f"{layer}.out"].T
        y = norm(x, w[f"{layer}.ffn_norm"])
        gate = y @ w[f"{layer}.gate"].T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ w[f"{layer}.up"].T)) @ w[f"{layer}.down"].T
    return norm(x, w["final_norm"]) @ w.get("head", w["embedding"]).T


def check_logits(model, weights):
    tokens = np.random.default_rng(1).integers(0, VOCAB, (2, 7))
    logits = model(jnp.asarray(tokens))
    wanted = np.stack([compute_logits(weights, row) for row in tokens])
    np.testing.assert_allclose(logits, wanted, atol=1e-5 * np.abs(wanted).max())
    return tokens, logits


@NAMES
def test_logits_are_those_of_the_formula(tmp_path, name):
    model = zoo.load(write_case(tmp_path, name)[0])
    tokens, logits = check_logits(model, draw_weights(name))
    assert isinstance(model, zoo.models.Encoder)
    for widths in ((3, 0), (0, 3)):
        mask = np.pad(np.ones((2, 7), bool), [(0, 0), widths])
        padded = model(jnp.asarray(np.pad(tokens, [(0, 0), widths])), mask=jnp.asarray(mask))
        np.testing.assert_allclose(np.asarray(padded)[:, widths[0] : 7 + widths[0]], logits, atol=2e-5)


@pytest.mark.parametrize(
    ("name", "changes"),
    [("llada", {"weight_tying": True}), ("llada", {"embedding_size": None, "vocab_size": VOCAB}), ("dream", {})],
)
def test_files_are_written_as_they_were_read(tmp_path, name, changes):
    directory, weights = write_case(tmp_path, name, **changes)
    model = zoo.load(directory)
    check_logits(model, weights)
    zoo.save(model, tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text()) == CASES[name][0] | changes
    first, again = (open_tensors(path) for path in (tmp_path, tmp_path / "again"))
    assert first.keys() == again.keys()
    assert all(x.read().tobytes() == again[key].read().tobytes() for key, x in first.items())


@NAMES
def test_packed_rows_and_adapters_on_a_mesh(tmp_path, name):
    model = zoo.load(write_case(tmp_path, name)[0])
    adapted = adapt(model)
    compare_meshes({"llada": model, "dream": adapted}[name], *draw_texts(VOCAB))
    zoo.adapters.save(adapted, tmp_path / "adapter")
    tokens = jnp.arange(6)[None]
    again = zoo.adapters.load(model, tmp_path / "adapter")
    np.testing.assert_allclose(again(tokens), adapted(tokens), atol=1e-5)
    assert np.abs(again(tokens) - model(tokens)).max() > 0.1


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llada", {"block_type": "sequential"}, "block_type = 'sequential', and layers are read with 'llama' only"),
        ("llada", {"layer_norm_type": "gemma_rms"}, "layer_norm_type = 'gemma_rms'"),
        ("llada", {"rope": False}, "rope = False"),
        ("llada", {"rope": False, "alibi": True}, "alibi = True would change the result"),
        ("llada", {"activation_type": "swiglu"}, "activation 'swiglu'"),
        ("llada", {"include_bias": True}, "include_bias = True would change the result"),
        ("llada", {"attention_layer_norm": True}, "attention_layer_norm = True would change the result"),
        ("llada", {"scale_logits": True}, "scale_logits = True would change the result"),
        ("llada", {"architectures": ["LLaDAMoEModelLM"]}, r"architectures = \['LLaDAMoEModelLM'\] would change"),
        ("llada", {"num_experts": 64}, "num_experts = 64 is not a key of llada"),
        ("dream", {"use_sliding_window": True}, "use_sliding_window = True would change the result"),
        ("dream", {"use_mrope": True}, "use_mrope = True would change the result"),
        ("dream", {"attention_bias": False}, "attention_bias = False is not a key of dream"),
    ],
)
def test_other_layers_are_refused_by_name(tmp_path, name, changes, message):
    with pytest.raises(zoo.CheckpointError, match=message):
        zoo.load(write_case(tmp_path, name, **changes)[0])


@pytest.mark.parametrize("key", ["block_type", "layer_norm_type", "rope", "activation_type"])
def test_missing_keys_are_the_defaults_of_the_class(tmp_path, key):
    directory, _ = write_case(tmp_path, "llada")
    config = {name: value for name, value in LLADA.items() if name != key}
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(zoo.CheckpointError, match=f"{key} = |activation 'swiglu'"):
        zoo.load(directory)


@NAMES
def test_models_generate_no_text_from_left_to_right(no_type_checks, tmp_path, name):
    model = zoo.load(write_case(tmp_path, name)[0])
    with pytest.raises(TypeError, match="generated by a Decoder, not by Encoder"):
        zoo.generate(model, jnp.arange(4)[None], max_new_tokens=2)
