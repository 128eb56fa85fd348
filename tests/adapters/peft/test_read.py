"""Loading PEFT files: tensors that do not fit the model, adapters of some layers, and dropout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.adapters.perturb import perturb
from zoo import adapters
from zoo.weights.safetensors import open_safetensors, write_safetensors


def make_model(layers=2, embed=16, **options):
    sizes = {"vocab": 32, "embed": embed, "layers": layers, "heads": 2, "mlp": 24, **options}
    return zoo.models.Transformer(**sizes, key=jax.random.key(0))


@pytest.fixture(scope="module")
def adapted():
    return adapters.lora(make_model(), targets=("query", "down"), rank=2, key=jax.random.key(1))


@pytest.mark.parametrize(
    ("method", "suffix"), [("dora", "lora_magnitude_vector"), ("ia3", "ia3_l"), ("vera", "vera_lambda_b")]
)
def test_load_with_vectors_of_wrong_length_raises(method, suffix, tmp_path):
    model = make_model()
    adapters.save(getattr(adapters, method)(model, key=jax.random.key(1)), tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    tensors = {name: np.array(tensor.read()) for name, tensor in open_safetensors(file).items()}
    name = next(name for name in tensors if name.endswith(f"layers.0.self_attn.v_proj.{suffix}"))
    tensors[name] = tensors[name][:-1]
    write_safetensors(file, {name: (x.shape, x.dtype) for name, x in tensors.items()}, tensors.__getitem__)
    with pytest.raises(zoo.CheckpointError, match=f"{suffix} has the shape .*where 16 numbers were expected"):
        adapters.load(model, tmp_path)


def test_load_with_tensors_of_another_model_raises(adapted, tmp_path):
    adapters.save(adapted, tmp_path)
    other = make_model(layers=1)
    with pytest.raises(zoo.CheckpointError, match="4 tensors for which the model has no module.*layers.1"):
        adapters.load(other, tmp_path)
    wide = make_model(embed=32)
    with pytest.raises(zoo.CheckpointError, match="multiplies 32 numbers and gives 32, and lora_A and lora_B"):
        adapters.load(wide, tmp_path)
    with pytest.raises(zoo.CheckpointError, match="there is no"):
        adapters.load(other, tmp_path / "nowhere")


def test_load_with_dropout_applies_inside_layers_only(adapted, tmp_path):
    """Dropout applies to the inputs of layers; for a head it raises."""
    adapters.save(adapted, tmp_path / "layers")
    loaded = perturb(adapters.load(adapters.remove(adapted), tmp_path / "layers", dropout=0.5))
    tokens = jnp.arange(12).reshape(2, 6)
    assert jnp.abs(loaded(tokens, key=jax.random.key(0)) - loaded(tokens)).max() > 1e-3
    model = make_model(layers=1, tied=False)
    adapters.save(adapters.lora(model, targets="head", key=jax.random.key(1)), tmp_path / "head")
    with pytest.raises(zoo.CheckpointError, match="what head reads is not dropped: read the adapter without"):
        adapters.load(model, tmp_path / "head", dropout=0.5)
