"""Models as programs that run without this library: `jax.export` artifacts, StableHLO, and weights as safetensors."""
