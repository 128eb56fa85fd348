"""Exchange weights with transformers: it reads what `zoo.save` writes, and `zoo.from_torch` reads its modules."""

from functools import partial
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from zoo.layers import BiasedRouter
from zoo.models.parameter_paths import find_differences
from zoo.tools.parity.checkpoint import compare_checkpoint
from zoo.weights.from_torch import compute_expectations
from zoo.weights.safetensors import read_json

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = [pytest.mark.neighbors, pytest.mark.filterwarnings("ignore")]  # theirs

FIXTURES = sorted((Path(__file__).parents[1] / "fixtures" / "models").iterdir())
ENCODERS = sorted((Path(__file__).parents[1] / "fixtures" / "encoders").iterdir())
SIZES = {"vocab": 40, "embed": 16, "layers": 2, "heads": 4, "mlp": 24}
MIXTRAL = "model.layers.1.block_sparse_moe.{}.weight"
MADE = {
    "llama": {"kv_heads": 2, "tied": False},
    "mistral": {"windows": (5,)},
    "qwen3": {"qk_norm": True, "head_dim": 8},
    "qwen3_windows": {"qk_norm": True, "windows": (None, 5)},
    "mixtral": {"experts": 4, "top": 2},
    "qwen3_moe": {"experts": 4, "top": 2, "qk_norm": True, "dense_layers": 1},
    "dots1": {"experts": 4, "top": 2, "qk_norm": True, "shared": 24, "router": partial(BiasedRouter, scale=2.5)},
}


def theirs(directory: Path, dtype=torch.float32):
    options = {"attn_implementation": "eager", "experts_implementation": "eager"}
    config = read_json(directory / "config.json")
    if "quantization_config" in config:
        options["quantization_config"] = transformers.Mxfp4Config(dequantize=True)
    kind = getattr(transformers, config["architectures"][0])  # not all are among the automatic classes
    return kind.from_pretrained(directory, dtype=dtype, **options)


def agree(model: zoo.models.Decoder, module) -> None:
    tokens = np.random.default_rng(0).integers(3, 40, (2, 9))
    with torch.no_grad():
        wanted = module(torch.tensor(tokens)).logits.numpy()
    ours = np.asarray(eqx.filter_jit(model)(tokens))
    assert np.abs(ours - wanted).max() <= 1e-4 * np.abs(wanted).max()


@pytest.mark.parametrize("folder", FIXTURES, ids=lambda folder: folder.name)
def test_transformers_reads_a_saved_checkpoint(folder, tmp_path):
    model = zoo.load(folder, dtype=jnp.float32)
    zoo.save(model, tmp_path)
    agree(model, theirs(tmp_path))


@pytest.mark.parametrize("name", MADE)
def test_transformers_reads_a_model_from_scratch(name, tmp_path):
    make = zoo.models.MixtureOfExperts if "experts" in MADE[name] else zoo.models.Transformer
    model = make(**SIZES, **MADE[name], key=jax.random.key(0))
    zoo.save(model, tmp_path)
    module = theirs(tmp_path)
    assert module.config.model_type == name.removesuffix("_windows")
    agree(model, module)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("folder", FIXTURES, ids=lambda folder: folder.name)
def test_from_torch_equals_load(folder, dtype):
    module = theirs(folder, getattr(torch, dtype))
    loaded, live = zoo.load(folder, dtype=dtype), zoo.from_torch(module)
    assert not list(find_differences(live, loaded))
    for ours, wanted in zip(jax.tree.leaves(live), jax.tree.leaves(loaded), strict=True):
        # transformers keeps what routers choose with in float32, and rounds the slopes of MiniMax, unlike `load`
        assert ours.dtype in (wanted.dtype, jnp.float32) or folder.name == "minimax"
        narrower = min(ours.dtype, wanted.dtype, key=lambda each: each.itemsize)
        np.testing.assert_array_equal(ours.astype(narrower), wanted.astype(narrower))


@pytest.mark.parametrize("folder", ENCODERS, ids=lambda folder: folder.name)
def test_from_torch_of_encoders_equals_load(folder):
    """Of the head that the module's class has, whatever its config says."""
    (name,) = read_json(folder / "config.json")["architectures"]
    module = getattr(transformers, name).from_pretrained(folder, dtype=torch.float32)
    module.config.architectures = None
    loaded, live = zoo.load(folder), zoo.from_torch(module)
    assert not list(find_differences(live, loaded))
    for ours, wanted in zip(jax.tree.leaves(live), jax.tree.leaves(loaded), strict=True):
        np.testing.assert_array_equal(ours, wanted)


def test_from_torch_reads_a_multimodal_module():
    text = dict(hidden_size=16, intermediate_size=20, num_hidden_layers=2, num_attention_heads=4, vocab_size=40)
    vision = dict(hidden_size=16, intermediate_size=20, num_hidden_layers=1, num_attention_heads=2, image_size=8)
    config = transformers.Mistral3Config(
        text_config=text | {"model_type": "mistral", "num_key_value_heads": 2},
        vision_config=vision | {"model_type": "pixtral", "patch_size": 4, "head_dim": 8},
        image_token_index=39,
    )
    module = transformers.Mistral3ForConditionalGeneration(config).eval()
    agree(zoo.from_torch(module), module)


def test_from_torch_state_dict_shares_memory(tmp_path):
    zoo.save(zoo.models.Transformer(**SIZES, tied=False, key=jax.random.key(0)), tmp_path)
    module = theirs(tmp_path)
    for parameter in module.parameters():  # as training leaves them: memory of PyTorch's own, not a mapped file
        parameter.data = parameter.data.clone()
    model = zoo.from_torch(module.state_dict(), tmp_path)
    module.lm_head.weight.data.copy_(torch.zeros_like(module.lm_head.weight))
    for ours, parameter in ((model.embedding, module.model.embed_tokens), (model.head, module.lm_head)):
        assert ours.weight.unsafe_buffer_pointer() == parameter.weight.data_ptr()
    assert model.stack.segments[0].blocks[0].mixer.query.weight.shape == (2, 16, 16)


def test_from_torch_errors_name_the_problem():
    with pytest.raises(zoo.CheckpointError, match="there is no config: pass config="):
        zoo.from_torch({})
    with pytest.raises(zoo.CheckpointError, match="expected a module or a state dict, got int"):
        zoo.from_torch(3, {})
    with pytest.raises(zoo.CheckpointError, match=r"lm_head.weight \[3\] has no place"):
        zoo.from_torch({"lm_head.weight": torch.zeros(3)}, {"model_type": "gemma", "num_hidden_layers": 1})
    with pytest.raises(zoo.CheckpointError, match="x is on the device 'meta', which has shapes and no numbers"):
        zoo.from_torch({"x": torch.zeros(2, device="meta")}, {"model_type": "llama"})
    with pytest.raises(zoo.CheckpointError, match="x is list, where a torch.Tensor, a NumPy array or a JAX array was"):
        zoo.from_torch({"x": [1.0]}, {"model_type": "llama"})


@pytest.mark.neighbors("peft")
def test_from_torch_names_the_wrapper(tmp_path):
    import peft

    zoo.save(zoo.models.Transformer(**SIZES, key=jax.random.key(0)), tmp_path)
    module = theirs(tmp_path)
    compiled = torch.compile(module)
    with pytest.raises(zoo.CheckpointError, match=r"OptimizedModule was passed, .* pass model._orig_mod"):
        zoo.from_torch(compiled)
    agree(zoo.from_torch(compiled._orig_mod), module)
    with pytest.raises(zoo.CheckpointError, match="a DataParallel was passed, .* pass model.module"):
        zoo.from_torch(torch.nn.DataParallel(module), tmp_path)
    with pytest.raises(
        zoo.CheckpointError, match="a dict was passed, .*PEFT wraps the model: pass model.merge_and_unload"
    ):
        zoo.from_torch({"base_model.model.lm_head.weight": torch.zeros(2)}, tmp_path)
    adapted = peft.get_peft_model(module, peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(zoo.CheckpointError, match=r"a PeftModel.* was passed, .* model.merge_and_unload"):
        zoo.from_torch(adapted)
    agree(zoo.from_torch(adapted.merge_and_unload()), module)


def test_expectations_complete_a_parity_report():
    for name, gradient in (("gpt_neox", "embed_out.weight"), ("mixtral", MIXTRAL.format("experts.3.w3"))):
        folder = next(folder for folder in FIXTURES if folder.name == name)
        expected = compute_expectations(folder)
        report = compare_checkpoint(folder, expected)
        assert report.passed, report.first_failure
        assert gradient in {name.removeprefix("grad.") for name in expected}
        assert all(
            line.theirs is not None for line in report.comparisons if line.name == "logits" or line.own is not None
        )
