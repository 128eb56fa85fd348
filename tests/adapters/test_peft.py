"""PEFT's files: what PyTorch computes with them, and the same bytes again. More cases lie where `ZOO_PARITY` says."""

import json
import os
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from zoo import adapters
from zoo.adapters.peft.write import collect_tensors
from zoo.weights.safetensors import open_safetensors, write_safetensors

FIXTURES = Path(__file__).parents[1] / "fixtures"
FOLDER = Path(os.environ.get("ZOO_PARITY", "nowhere")) / "adapters"
CASES = [(path, path, FIXTURES / "models") for path in sorted((FIXTURES / "adapters").iterdir())]
CASES += [(path.parent, path, FOLDER / "bases") for path in sorted(FOLDER.glob("*/adapter"))]
"""Where results lie, where the adapter does, and where the bases do."""
UNREAD = {
    "lora_embedding_alone": "ensure_weight_tying",
    "lora_experts": "target_parameters",
}
"""Cases that are refused, and what by."""
TOLERANCE, OF_GRADIENTS = 1e-4, 2e-4
run = eqx.filter_jit(lambda model, tokens: model(tokens))


def close(ours, theirs, tolerance, what):
    scale = np.abs(theirs).max()
    distance = np.abs(np.asarray(ours, np.float64) - theirs).max()
    assert distance <= tolerance * scale, f"{what}: {distance / scale:.1e} of the scale apart"


@pytest.mark.parametrize(("case", "adapter", "bases"), CASES, ids=lambda path: path.name)
def test_a_case(case, adapter, bases, tmp_path):
    meta = json.loads((case / "meta.json").read_text())
    expected = {
        name: np.asarray(tensor.read()) for name, tensor in open_safetensors(case / "expected.safetensors").items()
    }
    base = zoo.load(bases / meta["base"], dtype="float32")
    if case.name in UNREAD:
        with pytest.raises(zoo.CheckpointError, match=UNREAD[case.name]):
            adapters.load(base, adapter)
        return
    model, tokens = adapters.load(base, adapter), jnp.asarray(expected["input_ids"])

    @eqx.filter_jit
    def all_of_it(model):
        def loss(tuned):
            logits = eqx.combine(tuned, model)(tokens)
            chances = jax.nn.log_softmax(logits[:, :-1])
            return -jnp.take_along_axis(chances, tokens[:, 1:, None], -1).mean(), logits

        return jax.value_and_grad(loss, has_aux=True)(zoo.trainable(model))

    (loss, logits), gradients = all_of_it(model)
    close(logits, expected["logits"], TOLERANCE, "logits")
    np.testing.assert_allclose(loss, expected["loss"], rtol=1e-5)
    ours = collect_tensors(model, gradients, adapter_name="default")
    for name in [name for name in expected if name.startswith("grad.")]:
        close(ours[name.removeprefix("grad.")].reshape(expected[name].shape), expected[name], OF_GRADIENTS, name)

    merged = adapters.merge(model)
    if "logits_merged" in expected:
        close(run(merged, tokens), expected["logits_merged"], TOLERANCE, "logits when merged")
    zoo.save(merged, tmp_path / "merged")
    written = open_safetensors(tmp_path / "merged" / "model.safetensors")
    for name in [name for name in expected if name.startswith("merged.")]:
        close(written[name.removeprefix("merged.")].read(), expected[name], TOLERANCE, name)

    adapters.save(model, tmp_path / "adapter")
    one, other = (folder / "adapter_model.safetensors" for folder in (tmp_path / "adapter", adapter))
    assert one.read_bytes() == other.read_bytes()
    assert eqx.tree_equal(adapters.load(base, tmp_path / "adapter"), model)


@pytest.fixture(scope="module")
def tuned():
    model = zoo.models.Transformer(vocab=32, embed=16, layers=2, heads=2, mlp=24, key=jax.random.key(0))
    return adapters.lora(model, targets=("query", "down"), rank=2, key=jax.random.key(1))


METHODS = ("lora", "dora", "vera", "ia3", "loha", "lokr", "oft", "adalora")


@pytest.mark.parametrize("method", METHODS)
def test_what_was_made_here_is_written_and_read_again(method, tmp_path):
    model = zoo.models.Transformer(vocab=32, embed=16, layers=2, heads=2, mlp=24, key=jax.random.key(0))
    options = {"block_size": 8} if method == "oft" else {}
    wrapped = getattr(adapters, method)(model, key=jax.random.key(1), **options)
    noise = lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape)
    wrapped = eqx.combine(jax.tree.map(noise, zoo.trainable(wrapped)), wrapped)
    adapters.save(wrapped, tmp_path)
    again = adapters.load(model, tmp_path)
    tokens = jnp.arange(10).reshape(2, 5)
    np.testing.assert_allclose(again(tokens), wrapped(tokens), atol=1e-5)
    assert adapters.adapter_names(again) == ["default"]


@pytest.mark.parametrize("start", ["pissa", "olora"])
def test_an_adapter_that_took_a_part_of_its_base(start, tmp_path):
    """Nothing changes at birth; learnt, it is written for the base as it was, of twice the rank."""
    model = zoo.models.Transformer(vocab=32, embed=16, layers=2, heads=2, mlp=24, key=jax.random.key(0))
    options = {"rank": 4, "alpha": 8, "rank_pattern": {"layers.1.attention.query": 2}}
    wrapped = adapters.lora(model, init=start, key=jax.random.key(1), **options)
    tokens = jnp.arange(10).reshape(2, 5)
    np.testing.assert_allclose(wrapped(tokens), model(tokens), atol=1e-5)
    noise = lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape) * (x != 0)  # ranks that fill up stay
    learnt = eqx.combine(jax.tree.map(noise, zoo.trainable(wrapped)), wrapped)
    assert jnp.abs(learnt(tokens) - model(tokens)).max() > 0.1
    np.testing.assert_allclose(adapters.merge(learnt)(tokens), learnt(tokens), atol=1e-5)
    np.testing.assert_allclose(adapters.remove(learnt)(tokens), model(tokens), atol=1e-5)
    adapters.save(learnt, tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["r"] == 8 and set(config["rank_pattern"].values()) == {4}
    np.testing.assert_allclose(adapters.load(model, tmp_path)(tokens), learnt(tokens), atol=2e-5)
    with pytest.raises(ValueError, match="no 17 directions"):
        adapters.lora(model, init=start, rank=17, key=jax.random.key(1))
    with pytest.raises(ValueError, match="take a LoRA"):
        adapters.dora(model, init=start, key=jax.random.key(1))


def test_layers_of_two_kinds_draw_their_own_numbers():
    """Full and windowed attention take turns: two arrays that share a name."""
    wrapped = adapters.lora(zoo.load(FIXTURES / "models/qwen2"), targets="query", rank=2, key=jax.random.key(0))
    one, other = jax.tree.leaves(zoo.trainable(wrapped))[::2]
    assert one.shape == other.shape == (1, 2, 16) and not jnp.array_equal(one, other)


@pytest.mark.skipif(not FOLDER.exists(), reason="ZOO_PARITY names no folder with adapters")
def test_pissa_takes_what_peft_takes():
    left = {
        name: tensor.read() for name, tensor in open_safetensors(FOLDER / "pissa/residual/residual.safetensors").items()
    }
    rank = len(left["adapter.base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"])
    wrapped = adapters.lora(
        zoo.load(FOLDER / "bases/llama"), rank=rank, alpha=2 * rank, init="pissa", key=jax.random.key(0)
    )
    for ours, theirs in {"query": "q_proj", "value": "v_proj"}.items():
        base = getattr(wrapped.stack.segments[0].blocks[0].mixer, ours).base.weight
        for layer in range(len(base)):
            close(
                base[layer],
                left[f"base.model.layers.{layer}.self_attn.{theirs}.weight"],
                TOLERANCE,
                f"{theirs} {layer}",
            )


def changed(path, **keys):
    config = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps({**config, **keys}))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"peft_type": "LORAX"}, "peft_type 'LORAX'; did you mean 'LORA'"),
        ({"peft_type": None}, "Methods that are read: LORA"),
        ({"use_qalora": True}, "use_qalora = True is not computed here; it is read where it is False"),
        ({"bias": "some"}, "bias = 'some' is not read with this method; it is 'none' or 'lora_only' or 'all'"),
        ({"peft_type": "LOHA", "bias": "all", "r": 2}, "is not known|bias = 'all' is not read with this method"),
        ({"r": 0}, "r = 0, where a rank of at least 1 was expected"),
        ({"lora_alpha": "8"}, "lora_alpha = '8', where a number was expected"),
        ({"alpha_pattern": {"q_proj": None}}, "alpha_pattern = .*, where a table of numbers was expected"),
        ({"alpha_pattern": {"(": 2}}, "alpha_pattern has the pattern '\\(', which is none"),
        ({"rang": 3}, "the key 'rang' is not known"),
        ({"use_dora": True}, "lora_magnitude_vector"),
    ],
)
def test_options_that_are_not_computed(keys, message, tuned, tmp_path):
    adapters.save(tuned, tmp_path)
    changed(tmp_path, **keys)
    with pytest.raises(zoo.CheckpointError, match=message):
        adapters.load(adapters.remove(tuned), tmp_path)


@pytest.mark.parametrize(
    ("method", "keys", "message"),
    [
        ("oft", {"coft": True}, "coft = True is not computed here; it is read where it is False"),
        ("oft", {"peft_version": "0.17.1"}, "before PEFT 0.18 its series was another"),
        ("oft", {"num_cayley_neumann_terms": 0}, "num_cayley_neumann_terms = 0, where a number of at least 1"),
        ("oft", {"block_share": True}, "oft_R is \\[2, 28\\], which are no blocks of them"),
        ("oft", {"bias": "oft_only"}, "bias = 'oft_only' is not read with this method"),
        ("adalora", {"init_r": 0}, "init_r = 0, where a rank of at least 1 was expected"),
        ("adalora", {"use_dora": True}, "use_dora = True is not computed here"),
    ],
)
def test_options_of_oft_and_adalora(method, keys, message, tmp_path):
    model = zoo.models.Transformer(vocab=32, embed=16, layers=1, heads=2, mlp=24, key=jax.random.key(0))
    options = {"block_size": 8} if method == "oft" else {}
    adapters.save(getattr(adapters, method)(model, key=jax.random.key(1), **options), tmp_path)
    changed(tmp_path, **keys)
    with pytest.raises(zoo.CheckpointError, match=message):
        adapters.load(model, tmp_path)


def test_blocks_of_several_sizes(tmp_path):
    """PEFT has one number for all modules, and takes the nearest that fits: 16 inputs in 8, and 24 in 12."""
    model = zoo.models.Transformer(vocab=32, embed=16, layers=1, heads=2, mlp=24, key=jax.random.key(0))
    adapters.save(adapters.oft(model, targets=("query", "down"), blocks=2), tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["oft_block_size"]) == (0, 12)
    adapters.load(model, tmp_path)
    unlike = adapters.oft(adapters.oft(model, targets="query", block_size=16), targets="down", block_size=2)
    with pytest.raises(zoo.CheckpointError, match="one size of blocks, or one count"):
        adapters.save(unlike, tmp_path)


def test_lengths_learnt_in_some_layers_only(tmp_path):
    model = zoo.models.Transformer(vocab=32, embed=16, layers=2, heads=2, mlp=24, key=jax.random.key(0))
    wrapped = adapters.dora(model, targets=r"layers\.1\..*\.query", rank=2, key=jax.random.key(1))
    wrapped = eqx.combine(jax.tree.map(lambda x: 1.3 * x, zoo.trainable(wrapped)), wrapped)
    adapters.save(wrapped, tmp_path)
    tokens = jnp.arange(10).reshape(2, 5)
    np.testing.assert_allclose(adapters.load(model, tmp_path)(tokens), wrapped(tokens), atol=1e-5)
    assert jnp.abs(wrapped(tokens) - model(tokens)).max() > 1e-3


@pytest.mark.parametrize(
    ("method", "suffix"), [("dora", "lora_magnitude_vector"), ("ia3", "ia3_l"), ("vera", "vera_lambda_b")]
)
def test_vectors_of_another_length(method, suffix, tmp_path):
    model = zoo.models.Transformer(vocab=32, embed=16, layers=2, heads=2, mlp=24, key=jax.random.key(0))
    adapters.save(getattr(adapters, method)(model, key=jax.random.key(1)), tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    found = {name: np.array(tensor.read()) for name, tensor in open_safetensors(file).items()}
    name = next(name for name in found if name.endswith(f"layers.0.self_attn.v_proj.{suffix}"))
    found[name] = found[name][:-1]
    write_safetensors(file, {name: (x.shape, x.dtype) for name, x in found.items()}, found.__getitem__)
    with pytest.raises(zoo.CheckpointError, match=f"{suffix} has the shape .*where 16 numbers were expected"):
        adapters.load(model, tmp_path)


def test_tensors_that_fit_no_module(tuned, tmp_path):
    adapters.save(tuned, tmp_path)
    other = zoo.models.Transformer(vocab=32, embed=16, layers=1, heads=2, mlp=24, key=jax.random.key(0))
    with pytest.raises(zoo.CheckpointError, match="4 tensors for which the model has no module.*layers.1"):
        adapters.load(other, tmp_path)
    wide = zoo.models.Transformer(vocab=32, embed=32, layers=2, heads=2, mlp=24, key=jax.random.key(0))
    with pytest.raises(zoo.CheckpointError, match="multiplies 32 numbers and gives 32, and lora_A and lora_B"):
        adapters.load(wide, tmp_path)
    with pytest.raises(zoo.CheckpointError, match="there is no"):
        adapters.load(other, tmp_path / "nowhere")


def test_what_is_dropped_where_it_is_learnt_on(tuned, tmp_path):
    """In layers, as is said; of a head it cannot be, and that is said."""
    adapters.save(tuned, tmp_path / "layers")
    read = adapters.load(adapters.remove(tuned), tmp_path / "layers", dropout=0.5)
    tokens = jnp.arange(12).reshape(2, 6)
    noise = lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape)
    read = eqx.combine(jax.tree.map(noise, zoo.trainable(read)), read)
    assert jnp.abs(read(tokens, key=jax.random.key(0)) - read(tokens)).max() > 1e-3
    model = zoo.models.Transformer(vocab=32, embed=16, layers=1, heads=2, mlp=24, tied=False, key=jax.random.key(0))
    adapters.save(adapters.lora(model, targets="head", key=jax.random.key(1)), tmp_path / "head")
    with pytest.raises(zoo.CheckpointError, match="what head reads is not dropped: read the adapter without"):
        adapters.load(model, tmp_path / "head", dropout=0.5)


def test_which_adapter_is_written(tuned, tmp_path):
    with pytest.raises(zoo.CheckpointError, match="has no adapters"):
        adapters.save(adapters.remove(tuned), tmp_path)
    both = adapters.ia3(tuned, targets="query", inputs=None)
    with pytest.raises(zoo.CheckpointError, match="several adapters, lora, ia3: name one"):
        adapters.save(both, tmp_path)
    with pytest.raises(zoo.CheckpointError, match="no adapter 'dora'"):
        adapters.save(both, tmp_path, adapter_name="dora")
    adapters.save(both, tmp_path, adapter_name="lora")
    assert json.loads((tmp_path / "adapter_config.json").read_text())["peft_type"] == "LORA"
