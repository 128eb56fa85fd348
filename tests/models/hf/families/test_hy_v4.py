"""Hy4: names of published files, names in memory, default layers, meshes, and refused configs."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.models.hf.families.respelled import check_respelled_files
from tests.weights.test_families_on_meshes import adapt, draw_texts
from zoo import Layout
from zoo.models.hf.config import read_config
from zoo.models.hf.families.gpt_oss_layers import ClampedGatedMLP
from zoo.models.hf.families.hy_v4 import HY_V4
from zoo.models.hf.shapes import build_shapes
from zoo.parallel import SEQUENCE
from zoo.weights.safetensors import open_tensors, write_safetensors
from zoo.weights.to_torch import list_state

CASE = Path(__file__).parents[3] / "fixtures" / "models" / "hy_v4"


def build(**given):
    return build_shapes(HY_V4, read_config(HY_V4, given))


def test_published_names_of_gates_are_read_and_written(tmp_path):
    """transformers writes every gate of an MLP under the name of attention's gate. Published files do not, and have
    modules of multi-token prediction."""
    tensors = {name: tensor.read() for name, tensor in open_tensors(CASE).items()}
    gates = [name for name in tensors if ".linear_gate." in name and ".self_attn." not in name]
    assert len(gates) == 4 and gates[0] == "model.layers.0.mlp.linear_gate.weight"
    for name in gates:
        tensors[name.replace("linear_gate", "gate_proj")] = tensors.pop(name)
    folder = tmp_path / "published"
    shutil.copytree(CASE, folder)
    predictor = {"model.mtp_layers.0.enorm.weight": tensors["model.norm.weight"]}
    write_safetensors(folder / "model.safetensors", tensors | predictor)
    check_respelled_files(folder, CASE)


def test_names_in_memory():
    tensors = list_state(zoo.load(CASE), None, "module").tensors
    wanted = {
        "self_attn.sinks",
        "self_attn.gate_proj.weight",
        "attn_hc.fn",
        "ffn_hc.scale",
        "self_attn.indexer.k_norm.bias",
    }
    wanted |= {"mlp.shared_experts.gate_proj.weight", "mlp.experts.gate_up_proj"}
    assert {f"model.layers.1.{name}" for name in wanted} | {
        "model.hc_head.hc_base",
        "model.norm.weight",
    } < tensors.keys()
    assert (
        "model.layers.0.mlp.gate_proj.weight" in tensors and "model.layers.2.self_attn.indexer.wk.weight" not in tensors
    )


def test_default_layers():
    """As transformers has them: a dense layer, and indexers in layers 0 and 1, and in every fourth after it."""
    blocks = list(build(num_hidden_layers=10).stack.iter_blocks())
    assert [n for n, block in enumerate(blocks) if block.mixer.indexer is not None] == [0, 1, 5, 9]
    assert [type(block.ffn).__name__ for block in blocks] == ["GatedMLP"] + ["MixtureOfExperts"] * 9
    mixture = blocks[1].ffn
    assert isinstance(mixture.experts, ClampedGatedMLP) and mixture.experts.limit == 10
    assert type(mixture.shared).__name__ == "GatedMLP"
    attention = blocks[0].mixer.attention
    assert attention.gate.out_size == 32 * 256 and not attention.rotary.interleaved and attention.rotary.dim == 64
    assert blocks[0].mixer_connection.streams == 4 and blocks[0].mixer_connection.magnitude == 2
    assert blocks[0].mixer.indexer.key_norm.epsilon == 1e-5 and attention.latent_norm.epsilon == 1e-6


MESHES = {
    "expert, fsdp and tensor": ({"expert": 2, "fsdp": 2, "tensor": 2}, None),
    "context": ({"context": 4, "data": 2}, Layout(context="gathered")),
}


@pytest.mark.parametrize("sizes, layout", MESHES.values(), ids=MESHES)
def test_meshes_equal_one_device(sizes, layout):
    options = {} if layout is None else {"layout": layout}
    check_mesh(zoo.load(CASE, dtype=jnp.float32), zoo.make_mesh(**{"data": 1, **sizes}, **options))


def test_adapters_with_sequence_parallelism_equal_one_device():
    check_mesh(adapt(zoo.load(CASE, dtype=jnp.float32)), zoo.make_mesh(data=4, tensor=2, layout=SEQUENCE))


def check_mesh(model, mesh):
    batch, _ = draw_texts(40, lengths=(6, 10))
    one = zoo.make_mesh(devices=jax.devices()[:1])
    with jax.default_matmul_precision("highest"):
        (loss, grads), (wanted_loss, wanted) = jax.device_get(
            [
                zoo.value_and_grad(zoo.cross_entropy, each)(zoo.place(model, each), zoo.place_batch(batch, each))
                for each in (mesh, one)
            ]
        )
    np.testing.assert_allclose(loss, wanted_loss, rtol=1e-6)
    largest = max(np.abs(x).max() for x in jax.tree.leaves(wanted))
    for x, y in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted), strict=True):
        assert np.abs(x - y).max() <= 2e-5 * max(np.abs(y).max(), 0.01 * largest)


def test_scanned_layers_equal_a_plain_loop():
    model = zoo.load(CASE, dtype=jnp.float32)
    tokens = jnp.asarray(draw_texts(40)[0]["tokens"])
    scanned, plain = (zoo.configure(model, loop=loop)(tokens) for loop in ("scan", "plain"))
    np.testing.assert_allclose(scanned, plain, atol=1e-5)


def test_layers_that_share_a_selection_need_one():
    mesh = zoo.make_mesh(pipe=2, devices=jax.devices()[:2])
    batch = {name: x[:2] for name, x in draw_texts(40)[0].items()}
    given = json.loads((CASE / "config.json").read_text())
    given |= {"mlp_layer_types": ["sparse"] * 4, "indexer_types": ["full", "full", "shared", "shared"]}
    model = zoo.place(HY_V4.build(read_config(HY_V4, given), key=jax.random.key(0)), mesh)
    with pytest.raises(ValueError, match="no layer before it has selected keys: run the layers in their model"):
        zoo.value_and_grad(zoo.cross_entropy, mesh)(model, batch)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"swiglu_limit": 0.0}, "swiglu_limit = 0.0 should be a number above 0"),
        ({"indexer_types": ["shared", "full"], "num_hidden_layers": 2}, "lets the first layer share a selection"),
        (
            {"indexer_types": ["full"], "num_hidden_layers": 2},
            "indexer_types should say full or shared for all 2 layers",
        ),
        ({"mlp_layer_types": ["sparse"], "num_hidden_layers": 2}, "should say dense or sparse for all 2 layers"),
        ({"index_head_dim": 32}, "index_head_dim = 32, and qk_rope_head_dim = 64 of them are to be turned"),
        ({"q_lora_rank": None}, "q_lora_rank = None should be a whole number above 0"),
        ({"index_topk_freq": 2}, "index_topk_freq = 2 is not a key of hy_v4 that we know"),
        ({"first_k_dense_replace": 2}, "first_k_dense_replace = 2 is not a key of hy_v4 that we know"),
        ({"hc_sinkhorn_iters": 2}, "hc_sinkhorn_iters = 2 is not a key of hy_v4 that we know"),
    ],
    ids=str,
)
def test_configs_that_are_refused(given, message):
    with pytest.raises(ValueError) as caught:
        build(**given)
    assert message in str(caught.value)


def test_the_config_of_the_case_has_two_spellings():
    texts = ((CASE / name).read_text() for name in ("config.json", "config_hub.json"))
    written, on_the_hub = (read_config(HY_V4, json.loads(text)) for text in texts)
    blocks = [build_shapes(HY_V4, config).stack for config in (written, on_the_hub)]
    assert jax.tree.structure(blocks[0]) == jax.tree.structure(blocks[1])
