"""Granite's mixture of experts beside a shared MLP (Granite team, "Granite 4.0", 2025): GraniteMoE's layer, in which
every token also uses an MLP of its own width."""

from jaxtyping import Array, Key

from zoo.layers import TopSoftmaxRouter
from zoo.models.build import FeedForwardFactory
from zoo.models.decoder import Decoder
from zoo.models.hf.builders import make_gated_mlp_factory, make_mixture_factory
from zoo.models.hf.kinds import non_negative
from zoo.models.hf.spec import Config, Family, NameMap, fused, prefixed

from . import granite, granitemoe, llama

SHARED_NAMES: NameMap = {"input_linear": fused("gate", "up"), "output_linear": "down"}


def _build_granitemoeshared(config: Config, *, key: Key[Array, ""]) -> Decoder:
    return granite.build_granite_layers(config, make_shared_mixture(config), key=key)


def make_shared_mixture(config: Config) -> FeedForwardFactory:
    """Return a factory of Granite's mixtures of experts, with a shared MLP unless its width is 0; without experts, of
    the shared MLP."""
    shared = config["shared_intermediate_size"] or None
    if not config["num_local_experts"]:
        return make_gated_mlp_factory(config, width=shared)
    return make_mixture_factory(config, TopSoftmaxRouter, config["num_local_experts"], shared=shared)


def _map_granitemoeshared_names(config: Config) -> NameMap:
    return {**granitemoe.map_granitemoe_names(config), **_map_shared_names()}


def map_granitemoeshared_memory_names(config: Config) -> NameMap:
    """Return the name map in memory."""
    return {**granitemoe.map_granitemoe_memory_names(config), **_map_shared_names()}


def _map_shared_names() -> NameMap:
    ours = "layers.*.mixture_of_experts.shared"
    return prefixed("model.layers.*.shared_mlp", ours, SHARED_NAMES)


GRANITEMOESHARED = Family(
    name="granitemoeshared",
    architecture="GraniteMoeSharedForCausalLM",
    build=_build_granitemoeshared,
    names=_map_granitemoeshared_names,
    defaults={**granitemoe.DEFAULTS, "shared_intermediate_size": non_negative(0)},
    ignored_tensors=llama.LLAMA.ignored_tensors,
    memory_names=map_granitemoeshared_memory_names,
)
