"""DiffusionGemma against the numbers of its class in transformers: both readings, a sampler step, gradients, files;
on a mesh and with adapters against one device."""

import json
import shutil
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.weights.conftest import make_model
from tests.weights.test_families_on_meshes import adapt, compare_meshes
from zoo.models.block_denoiser import accept_tokens, compute_temperature, redraw_tokens
from zoo.parallel import all_gather
from zoo.tools.parity.checkpoint import read_expectations
from zoo.weights.safetensors import open_tensors
from zoo.weights.save import export_tensors
from zoo.weights.stages import read_name_map

FIXTURE = Path(__file__).parents[1] / "fixtures" / "block_denoisers" / "diffusion_gemma"
META = json.loads((FIXTURE / "meta.json").read_text())
EXPECTED = read_expectations(FIXTURE / "expected.safetensors")
TOKENS = jnp.asarray(EXPECTED["input_ids"], jnp.int32)
CANVAS = jnp.asarray(EXPECTED["decoder_input_ids"], jnp.int32)
SECOND = jnp.asarray(EXPECTED["step2.decoder_input_ids"], jnp.int32)


@pytest.fixture(scope="module")
def model():
    return zoo.load(FIXTURE)


def check(ours, name, tolerance=2e-5):
    np.testing.assert_allclose(ours, EXPECTED[name], atol=tolerance * np.abs(EXPECTED[name]).max(), err_msg=name)


def test_readings_are_those_of_the_class(model):
    @eqx.filter_jit
    def run(model):
        hidden, states = model.read(TOKENS, model.init_state(2, 33))
        logits = (
            model.denoise(CANVAS, states),
            model.denoise(SECOND, states, jnp.asarray(EXPECTED["step1.scaled_logits"])),
        )
        block = jnp.asarray(EXPECTED["block2.input_ids"][:, TOKENS.shape[1] :], jnp.int32)
        _, after = model.read(block, states)
        later = model.denoise(jnp.asarray(EXPECTED["block2.decoder_input_ids"], jnp.int32), after)
        prompt = jnp.asarray(EXPECTED["padleft.input_ids"], jnp.int32)
        padded = model(prompt, CANVAS, mask=jnp.asarray(EXPECTED["padleft.attention_mask"], bool))
        return hidden, model.hidden(CANVAS, states), *logits, later, padded

    names = "encoder_last_hidden_state", "hidden_states.2", "logits", "step2.logits", "block2.logits", "padleft.logits"
    for ours, name in zip(run(model), names, strict=True):
        check(ours, name)


def test_step_of_the_sampler_is_that_of_the_class():
    given = META["temperature"]
    steps = given["max_denoising_steps"]
    temperature = compute_temperature(steps, steps, given["t_min"], given["t_max"])
    assert compute_temperature(0, steps, given["t_min"], given["t_max"]) == given["t_min"]
    scaled = EXPECTED["logits"] / temperature
    check(scaled, "step1.scaled_logits")
    canvas, is_accepted = accept_tokens(jnp.asarray(scaled), CANVAS, META["entropy_bound"])
    np.testing.assert_array_equal(is_accepted, EXPECTED["step1.accepted_mask"])
    np.testing.assert_array_equal(canvas, EXPECTED["step1.accepted"])
    _, first = accept_tokens(jnp.asarray(scaled), CANVAS, 0.0)
    assert (first.sum(1) == 1).all()  # the entropies before the first place add up to nothing
    drawn = redraw_tokens(canvas, is_accepted, 73, key=jax.random.key(0))
    np.testing.assert_array_equal(drawn[is_accepted], canvas[is_accepted])
    assert (drawn != canvas).any() and drawn.min() >= 0 and drawn.max() < 73


def compute_loss(model, batch):
    """Sum the cross entropy of a canvas; with a first `canvas`, conditioned on its logits."""
    tokens, labels = batch["tokens"], batch["labels"]
    states = model.init_state(tokens.shape[0], tokens.shape[1] + labels.shape[1])
    _, states = model.read(tokens, states)
    if "canvas" in batch:
        last = model.denoise(batch["canvas"], states) / 0.7
    else:
        last = jnp.asarray(batch["last"])
    logits = all_gather(model.denoise(batch["second"], states, last), "vocab", 2)
    chances = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=2)
    return -chances.sum(), labels.size


def test_loss_and_gradients_are_those_of_the_class(model):
    batch = {"tokens": TOKENS, "second": SECOND, "labels": EXPECTED["labels"].astype(np.int32)}
    batch["last"] = EXPECTED["step1.scaled_logits"]
    loss, grads = zoo.value_and_grad(compute_loss, zoo.make_mesh(devices=jax.devices()[:1]))(model, batch)
    check(loss, "loss")
    tensors = export_tensors(jax.tree.map(np.asarray, grads), read_name_map(model.origin))
    found = {name: x.read() for name, x in tensors.items()}
    names = [name for name in EXPECTED if name.startswith("grad.")]
    assert len(names) == 10
    for name in names:
        check(found[name.removeprefix("grad.")], name, 1e-4)
    for name, norm in META["grad_norm"].items():
        np.testing.assert_allclose(np.linalg.norm(found[name]), norm, rtol=1e-3, err_msg=name)


def test_file_is_written_as_it_was_read(model, tmp_path):
    zoo.save(model, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()) == json.loads((FIXTURE / "config.json").read_text())
    first, again = (open_tensors(path) for path in (FIXTURE, tmp_path))
    assert first.keys() == again.keys()
    assert all(x.read().tobytes() == again[name].read().tobytes() for name, x in first.items())


@pytest.mark.parametrize("is_adapted", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_canvas_on_a_mesh_equals_one_on_one_device(is_adapted):
    """With the vocabulary sharded, in value and in the gradient of every parameter."""
    config = json.loads((FIXTURE / "config.json").read_text())
    config["text_config"]["vocab_size"] = 74
    model = jax.tree.map(lambda x: 0.2 * x, make_model("diffusion_gemma", config))
    if is_adapted:
        model = adapt(model)
    random = np.random.default_rng(0)
    draw = lambda length: random.integers(0, 69, (8, length)).astype(np.int32)
    batch = {"tokens": draw(9), "canvas": draw(8), "second": draw(8), "labels": draw(8)}
    compare_meshes(model, batch, batch, compute_loss)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tie_word_embeddings": False}, "tie_word_embeddings = False would change the result"),
        ({"vision_config": None}, "vision_tower"),
        ({"text_config": {"use_bidirectional_attention": "all"}}, "use_bidirectional_attention = 'all'"),
        ({"text_config": {"hidden_size_per_layer_input": 4}}, "hidden_size_per_layer_input = 4 is not a key"),
    ],
)
def test_other_models_are_refused_by_name(tmp_path, changes, message):
    config = json.loads((FIXTURE / "config.json").read_text())
    inner = config["text_config"] | changes.pop("text_config", {})
    (tmp_path / "config.json").write_text(json.dumps(config | changes | {"text_config": inner}))
    shutil.copy(FIXTURE / "model.safetensors", tmp_path)
    with pytest.raises(zoo.CheckpointError, match=message):
        zoo.load(tmp_path)


def test_natural_mistakes_are_refused(model):
    with pytest.raises(NotImplementedError, match="tokens of images"):
        model.read(TOKENS.at[0, 0].set(71), model.init_state(2, 30))
    with pytest.raises(ValueError, match="its cache holds 4"):
        model.denoise(CANVAS, model.init_state(2, 4))
