"""Loading PEFT files: tensors that are missing or do not fit the model, adapters of some layers, and dropout."""

import json
import shutil
from functools import cache
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.adapters.perturb import perturb
from tests.quick import mark_slow
from zoo import adapters
from zoo.weights.safetensors import open_safetensors, write_safetensors


@cache
def make_model(layers=2, embed=16, **options):
    sizes = {"vocab": 32, "embed": embed, "layers": layers, "heads": 2, "mlp": 24, **options}
    return zoo.models.Transformer(**sizes, key=jax.random.key(0))


@pytest.fixture(scope="module")
def adapted():
    return adapters.lora(make_model(), targets=("query", "down"), rank=2, key=jax.random.key(1))


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("method", "suffix"), [("dora", "lora_magnitude_vector"), ("ia3", "ia3_l"), ("vera", "vera_lambda_b")]
)
def test_load_with_vectors_of_wrong_length_raises(method, suffix, tmp_path):
    model = make_model()
    adapt = eqx.filter_jit(lambda model: getattr(adapters, method)(model, key=jax.random.key(1)))
    adapters.save(adapt(model), tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    tensors = {name: np.array(tensor.read()) for name, tensor in open_safetensors(file).items()}
    name = next(name for name in tensors if name.endswith(f"layers.0.self_attn.v_proj.{suffix}"))
    tensors[name] = tensors[name][:-1]
    write_safetensors(file, tensors)
    with pytest.raises(zoo.CheckpointError, match=f"{suffix} of .*v_proj is .*15.*, where .*16.* was expected"):
        adapters.load(model, tmp_path)


def test_load_with_inputs_and_outputs_of_one_stack_raises(tmp_path):
    """An IA3 multiplies the inputs of all layers that are stacked, or the outputs of all."""
    model = make_model()
    adapters.save(adapters.ia3(model, targets="query", inputs=None), tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    tensors = {name: np.array(tensor.read()) for name, tensor in open_safetensors(file).items()}
    mixed = {name: x.T if ".layers.1." in name else x for name, x in tensors.items()}
    write_copy(tmp_path, None, mixed, feedforward_modules=r".*\.layers\.1\..*")
    with pytest.raises(zoo.CheckpointError, match=r"layers.*query is one .* of_in and for others of_out: feedforward_"):
        adapters.load(model, tmp_path)


def test_load_of_a_table_with_another_method_raises(tmp_path):
    model = make_model(layers=1, tied=False)
    adapters.save(adapters.ia3(model, targets="query", inputs=None), tmp_path)
    tensors = {"base_model.model.model.embed_tokens.ia3_l": np.ones((32, 1), np.float32)}
    write_copy(tmp_path, None, tensors, target_modules=["embed_tokens"])
    with pytest.raises(zoo.CheckpointError, match="peft_type is IA3, and model.embed_tokens is a table: .* LoRA only"):
        adapters.load(model, tmp_path)


def test_load_with_tensors_of_another_model_raises(adapted, tmp_path):
    adapters.save(adapted, tmp_path)
    other = make_model(layers=1)
    with pytest.raises(zoo.CheckpointError, match="4 tensors for which the model has no module.*layers.1"):
        adapters.load(other, tmp_path)
    wide = make_model(embed=32)
    with pytest.raises(
        zoo.CheckpointError,
        match=r"lora_B of .*q_proj are \[2, 16\], \[16, 2\], where \[2, 32\], \[32, 2\] were expected",
    ):
        adapters.load(wide, tmp_path)
    with pytest.raises(zoo.CheckpointError, match="there is no"):
        adapters.load(other, tmp_path / "nowhere")
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(zoo.CheckpointError, match="adapter_model.safetensors cannot be read: No such file"):
        adapters.load(other, tmp_path)


FIXTURES = Path(__file__).parents[2] / "fixtures"
METHODS = ("lora_patterns", "dora", "ia3", "vera", "loha", "lokr", "oft", "adalora")
TRAINED = ("lora_bias_only", "lora_bias_all", "lora_saved_norms")
load_base = cache(lambda name: zoo.load(FIXTURES / "models" / name, dtype="float32"))


def read_fixture(name):
    """Return the base, tensors and path of a fixture that PEFT wrote."""
    path = FIXTURES / "adapters" / name
    tensors = {key: np.array(x.read()) for key, x in open_safetensors(path / "adapter_model.safetensors").items()}
    return load_base(json.loads((path / "meta.json").read_text())["base"]), tensors, path


def write_copy(path, source, tensors, **config):
    """Write an adapter with these tensors, and with the config of another adapter in which some keys are changed; that
    of the path itself without a source."""
    path.mkdir(exist_ok=True)
    if source is not None:
        shutil.copy(source / "adapter_config.json", path)
    if config:
        given = json.loads((path / "adapter_config.json").read_text())
        (path / "adapter_config.json").write_text(json.dumps(given | config))
    write_safetensors(path / "adapter_model.safetensors", tensors)


@pytest.mark.parametrize(
    "case", mark_slow([*METHODS, *TRAINED], but=("lora_patterns", "oft", "vera", "lora_bias_only"))
)
def test_load_without_some_tensors_raises(case, tmp_path):
    """Each kind of tensor of one module, a module, a layer, and all tensors."""
    base, tensors, source = read_fixture(case)
    names = sorted(tensors)
    first = next(name for name in names if "layers.0." in name or ".h.0." in name)
    module = first.rsplit(".", 2 if first.endswith(".weight") else 1)[0] + "."
    dropped = [[name] for name in names if name.startswith(module)]
    dropped += [[name for name in names if name.startswith(module)], [name for name in names if ".1." in name], names]
    dropped += [[name] for name in names if case in TRAINED and "lora_" not in name]
    for number, drop in enumerate(dropped):
        path = tmp_path / str(number)
        write_copy(path, source, {name: x for name, x in tensors.items() if name not in drop})
        with pytest.raises(zoo.CheckpointError, match="incomplete|nothing|has no|not both"):
            adapters.load(base, path)


@pytest.mark.parametrize("case", METHODS)
@pytest.mark.parametrize("dtype", ["int32", "bool", "float8_e4m3fn"])
def test_load_with_tensors_that_are_not_floats_raises(case, dtype, tmp_path):
    base, tensors, source = read_fixture(case)
    name = sorted(tensors)[-1]
    write_copy(tmp_path, source, tensors | {name: tensors[name].astype(jnp.dtype(dtype))})
    with pytest.raises(zoo.CheckpointError, match=f"{name} is of {dtype}, expected floating-point numbers"):
        adapters.load(base, tmp_path)


def test_load_of_modules_that_the_config_does_not_target_raises(tmp_path):
    """PEFT would ignore them with a warning, and compute something else."""
    base, tensors, source = read_fixture("lora")
    write_copy(tmp_path, source, tensors, target_modules=["q_proj"])
    with pytest.raises(zoo.CheckpointError, match="4 tensors of modules that .* does not target, .*v_proj"):
        adapters.load(base, tmp_path)
    write_copy(tmp_path, source, tensors, modules_to_save=["pooler"])
    with pytest.raises(zoo.CheckpointError, match="modules_to_save has 'pooler', which no module of the model is"):
        adapters.load(base, tmp_path)
    write_copy(tmp_path, source, tensors, target_modules=["c_attn"])
    with pytest.raises(zoo.CheckpointError, match=r"targets \['c_attn'\], which no module of the model is"):
        adapters.load(base, tmp_path)


@pytest.mark.parametrize(
    "config",
    [
        {"layers_to_transform": [1], "target_modules": ["q_proj", "v_proj"]},
        {"layers_to_transform": 1, "layers_pattern": "layers", "target_modules": ["q_proj", "v_proj"]},
        {"target_modules": r"model\.layers\.(?!0\.).*\.(q|v)_proj"},
        {"target_modules": ["q_proj", "v_proj"], "exclude_modules": r".*\.0\..*"},
        {"target_modules": ["q_proj", "v_proj"], "exclude_modules": ["0.self_attn.q_proj", "0.self_attn.v_proj"]},
    ],
)
def test_load_of_some_layers_reads_what_the_config_selects(config, tmp_path):
    base, tensors, source = read_fixture("lora")
    last = {name: x for name, x in tensors.items() if ".layers.1." in name}
    write_copy(tmp_path / "last", source, last, **config)
    loaded = adapters.load(base, tmp_path / "last")
    assert zoo.count(loaded) == zoo.count(adapters.load(base, source))  # stacked with a layer that has none
    write_copy(tmp_path / "all", source, tensors, **config)
    with pytest.raises(zoo.CheckpointError, match="does not target, .*layers.0"):
        adapters.load(base, tmp_path / "all")


def test_load_with_several_dtypes_rounds_none(tmp_path):
    base, tensors, source = read_fixture("lora")
    first = sorted(tensors)[0]
    write_copy(tmp_path, source, tensors | {first: tensors[first].astype(jnp.bfloat16)})
    x, y = (jax.tree.leaves(zoo.trainable(adapters.load(base, path))) for path in (source, tmp_path))
    assert all(a.dtype == b.dtype for a, b in zip(x, y, strict=True))
    assert sum(int((a != b).sum()) for a, b in zip(x, y, strict=True)) <= tensors[first].size


def test_load_with_dropout_applies_inside_layers_only(adapted, tmp_path):
    """Dropout applies to the inputs of layers; for a head it raises."""
    adapters.save(adapted, tmp_path / "layers")
    loaded = perturb(adapters.load(adapters.remove(adapted), tmp_path / "layers", dropout=0.5))
    tokens = jnp.arange(12).reshape(2, 6)
    dropped, whole = eqx.filter_jit(lambda model: (model(tokens, key=jax.random.key(0)), model(tokens)))(loaded)
    assert jnp.abs(dropped - whole).max() > 1e-3
    model = make_model(layers=1, tied=False)
    adapters.save(adapters.lora(model, targets="head", key=jax.random.key(1)), tmp_path / "head")
    with pytest.raises(zoo.CheckpointError, match="what head reads is not dropped: read the adapter without"):
        adapters.load(model, tmp_path / "head", dropout=0.5)


def test_layer_replication_repeats_layers_of_the_base(tmp_path):
    """Each copy has a LoRA of its own, which is merged into that copy only; the result is saved as what it is."""
    base = zoo.load(Path(__file__).parents[2] / "fixtures/models/llama", dtype="float32")
    repeated = zoo.models.keep_layers(base, [0, 1, 1])
    model = perturb(adapters.lora(repeated, rank=2, key=jax.random.key(0)))
    adapters.save(model, tmp_path)
    path = tmp_path / "adapter_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "layer_replication": [[0, 2], [1, 2]]}))
    loaded = adapters.load(base, tmp_path)
    tokens = jnp.arange(10).reshape(2, 5)
    expected = model(tokens)
    np.testing.assert_allclose(loaded(tokens), expected, atol=1e-5)
    zoo.save(adapters.merge(loaded), tmp_path / "merged")
    np.testing.assert_allclose(zoo.load(tmp_path / "merged")(tokens), expected, atol=1e-5)
    for wrong, message in (
        ([[0, 3]], "there is no layer 2"),
        ([[0, 1, 2]], "a list of stretches of layers, .begin, end."),
        ([[1, 1]], "layers is empty"),
    ):
        path.write_text(json.dumps({**config, "layer_replication": wrong}))
        with pytest.raises(zoo.CheckpointError, match=message):
            adapters.load(base, tmp_path)
