"""Granite's mixture of experts with sliding windows (Granite team, "Granite Swash", 2026): GraniteMoE's experts, beside
a shared MLP where the config has one, after the windowed attention with sinks of `granite_swa`."""

from jaxtyping import Array, Key

from zoo.models.hf import grammar as hf

from . import granite_swa, granitemoeshared, llama


def _build_granitemoe_swa(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    return granite_swa.build_windowed_granite(config, granitemoeshared.make_shared_mixture(config), key=key)


def _map_granitemoe_swa_names(config: hf.Config) -> hf.NameMap:
    """Return the name map: files have all experts of a layer in one tensor, as transformers has them in memory."""
    sinks = {"model.layers.*.self_attn.sinks": "layers.*.attention.sinks"}
    return {**granitemoeshared.map_granitemoeshared_memory_names(config), **sinks}


GRANITEMOE_SWA = hf.Family(
    name="granitemoe_swa",
    architecture="GraniteMoeSWAForCausalLM",
    build=_build_granitemoe_swa,
    names=_map_granitemoe_swa_names,
    defaults={
        **hf.omit(granitemoeshared.GRANITEMOESHARED.declared, "head_dim"),
        **granite_swa.WINDOW_DEFAULTS,
    },
    ignored_tensors=llama.LLAMA.ignored_tensors,
)
