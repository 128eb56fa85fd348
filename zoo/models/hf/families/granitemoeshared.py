"""Granite's mixture of experts beside a shared MLP (Granite team, "Granite 4.0", 2025): GraniteMoE's layer, in which
every token also uses an MLP of its own width."""

from jaxtyping import Array, Key

from zoo.layers import TopSoftmaxRouter
from zoo.models.hf import grammar as hf

from . import granite, granitemoe, llama

SHARED_NAMES: hf.NameMap = {"input_linear": hf.fused("gate", "up"), "output_linear": "down"}


def _build_granitemoeshared(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    return granite.build_granite_layers(config, make_shared_mixture(config), key=key)


def make_shared_mixture(config: hf.Config) -> hf.FeedForwardFactory:
    """Return a factory of Granite's mixtures of experts, with a shared MLP unless its width is 0; without experts, of
    the shared MLP."""
    shared = config["shared_intermediate_size"] or None
    if not config["num_local_experts"]:
        return hf.make_gated_mlp_factory(config, width=shared)
    return hf.make_mixture_factory(config, TopSoftmaxRouter, config["num_local_experts"], shared=shared)


def _map_granitemoeshared_names(config: hf.Config) -> hf.NameMap:
    return {**granitemoe.map_granitemoe_names(config), **_map_shared_names()}


def map_granitemoeshared_memory_names(config: hf.Config) -> hf.NameMap:
    """Return the name map in memory."""
    return {**granitemoe.map_granitemoe_memory_names(config), **_map_shared_names()}


def _map_shared_names() -> hf.NameMap:
    ours = "layers.*.mixture_of_experts.shared"
    return hf.prefixed("model.layers.*.shared_mlp", ours, SHARED_NAMES)


GRANITEMOESHARED = hf.Family(
    name="granitemoeshared",
    architecture="GraniteMoeSharedForCausalLM",
    build=_build_granitemoeshared,
    names=_map_granitemoeshared_names,
    defaults={**granitemoe.DEFAULTS, "shared_intermediate_size": hf.non_negative(0)},
    ignored_tensors=llama.LLAMA.ignored_tensors,
    memory_names=map_granitemoeshared_memory_names,
)
