"""Arcee's AFM (Arcee AI, "AFM-4.5B", 2025): LLaMA's layer with an MLP of squared ReLUs that has no gate."""

from jaxtyping import Array, Key

from zoo.models.hf import grammar as hf

from . import llama


def _build_arcee(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    norm = hf.make_rms_norm_factory(config)
    bias = config["attention_bias"]
    mixer = hf.make_attention_factory(config, bias=bias, out_bias=bias)
    layers = [(mixer, hf.make_mlp_factory(config, bias=config["mlp_bias"]))] * config["num_hidden_layers"]
    return hf.build_config_decoder(config, layers, norm, key=key)


def map_arcee_names(config: hf.Config) -> hf.NameMap:
    """Return the name map of LLaMA-like models whose MLP has no gate."""
    return llama.map_llama_layers(hf.prefixed("mlp", "mlp", {"up_proj": "up", "down_proj": "down"}))


ARCEE = hf.Family(
    name="arcee",
    architecture="ArceeForCausalLM",
    build=_build_arcee,
    names=map_arcee_names,
    defaults={
        **llama.DEFAULTS,
        "hidden_size": 2560,
        "intermediate_size": 18432,
        "hidden_act": "relu2",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    },
    ignored_tensors=llama.LLAMA.ignored_tensors,
)
