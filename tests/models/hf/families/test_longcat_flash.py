"""LongCat-Flash: files with and without matrices that nothing uses, loads of experts without computation, meshes, and
refused configs."""

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
from zoo.layers.token_info import token_info
from zoo.models import tokens_per_expert, update_expert_bias
from zoo.models.hf.config import read_config
from zoo.models.hf.families.longcat_flash import LONGCAT_FLASH
from zoo.models.hf.shapes import build_shapes
from zoo.models.load_balancing import count_active_parameters
from zoo.parallel import SEQUENCE
from zoo.weights.safetensors import open_tensors, write_safetensors
from zoo.weights.to_torch import list_state

CASE = Path(__file__).parents[3] / "fixtures" / "models" / "longcat_flash"
EXPERTS, IDENTITIES, LAYERS = 4, 3, 2
UNUSED = [
    f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight"
    for layer in range(LAYERS)
    for expert in range(EXPERTS, EXPERTS + IDENTITIES)
    for name in ("gate", "up")
]


def read_tensors(folder):
    return {name: tensor.read() for name, tensor in open_tensors(folder).items()}


def test_published_files_lack_what_transformers_writes(tmp_path):
    """Matrices of experts that have none, which are left aside; with modules of multi-token prediction."""
    tensors = read_tensors(CASE)
    norm = tensors["model.norm.weight"]
    published = {name: tensor for name, tensor in tensors.items() if name not in UNUSED}
    assert len(published) == len(tensors) - len(UNUSED)
    assert zoo.load(CASE).origin.left_aside.startswith(f"{len(UNUSED)} tensors (4,608 bytes)")
    folder = tmp_path / "published"
    shutil.copytree(CASE, folder)
    write_safetensors(folder / "model.safetensors", published | {"model.mtp.layers.0.enorm.m.weight": norm})
    check_respelled_files(folder, CASE)
    zoo.save(zoo.load(folder), tmp_path / "text")
    assert read_tensors(tmp_path / "text").keys() == published.keys()


def test_a_file_without_a_routed_expert_is_refused(tmp_path):
    folder = tmp_path / "case"
    shutil.copytree(CASE, folder)
    tensors = read_tensors(CASE)
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    write_safetensors(folder / "model.safetensors", tensors)
    with pytest.raises(zoo.CheckpointError, match=r"layers\.1\.mlp\.experts\.3\.up_proj\.weight"):
        zoo.load(folder)


def test_names_in_memory():
    tensors = list_state(zoo.load(CASE), None, "module").tensors
    assert tensors["model.layers.1.mlp.experts.gate_up_proj"].shape == (EXPERTS, 24, 16)
    assert {"model.layers.0.self_attn.1.kv_b_proj.weight", "model.layers.1.mlps.0.up_proj.weight"} < tensors.keys()


def test_loads_count_experts_without_computation():
    model = zoo.load(CASE, dtype=jnp.float32)
    tokens = jnp.asarray(draw_texts(40)[0]["tokens"])
    routing = model.hidden(tokens, token_info(tokens))[0].routing
    loads = [tokens_per_expert(layer) for layer in routing]
    assert [load.shape for load in loads] == [(EXPERTS + IDENTITIES,)] * LAYERS
    assert all(load.sum() == 3 * tokens.size and load[EXPERTS:].sum() > 0 for load in loads)
    before, after = (
        [block.mixture.router.selection_bias for block in x.stack.iter_blocks()]
        for x in (model, update_expert_bias(model, loads, rate=0.5))
    )
    for load, old, new in zip(loads, before, after, strict=True):
        np.testing.assert_allclose(new - old, 0.5 * np.sign(load.mean() - load), atol=1e-6)
    assert zoo.count(model) - count_active_parameters(model) == LAYERS * (EXPERTS - 3) * 3 * 12 * 16


MESHES = {
    "expert and context": ({"expert": 2, "context": 2, "tensor": 2}, "auto"),
    "boxes": ({"expert": 4, "data": 2}, "boxes"),
    "gathered": ({"expert": 2, "fsdp": 2, "tensor": 2}, "gathered"),
}


@pytest.mark.parametrize("sizes, form", MESHES.values(), ids=MESHES)
def test_experts_on_meshes_equal_one_device(sizes, form):
    check_mesh(zoo.load(CASE, dtype=jnp.float32), zoo.make_mesh(**{"data": 1, **sizes}, layout=zoo.Layout(expert=form)))


def test_adapters_with_sequence_parallelism_equal_one_device():
    check_mesh(adapt(zoo.load(CASE, dtype=jnp.float32)), zoo.make_mesh(data=2, expert=2, tensor=2, layout=SEQUENCE))


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
        assert np.abs(x - y).max() <= 1e-5 * max(np.abs(y).max(), 0.01 * largest)


def test_scanned_layers_equal_a_plain_loop():
    model = zoo.load(CASE, dtype=jnp.float32)
    tokens = jnp.asarray(draw_texts(40)[0]["tokens"])
    scanned, plain = (zoo.configure(model, loop=loop)(tokens) for loop in ("scan", "plain"))
    np.testing.assert_allclose(scanned, plain, atol=1e-5)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"moe_topk": 8, "n_routed_experts": 4, "zero_expert_num": 3}, "at most all of 7 experts, not 8"),
        ({"zero_expert_type": "copy"}, "zero_expert_type = 'copy' would change the result"),
        ({"mla_scale_q_lora": False}, "mla_scale_q_lora = False would change the result"),
        ({"mla_scale_kv_lora": False}, "mla_scale_kv_lora = False would change the result"),
        ({"attention_method": "MHA"}, "attention_method = 'MHA' would change the result"),
        ({"router_bias": True}, "router_bias = True would change the result"),
        ({"q_lora_rank": None}, "q_lora_rank = None should be a whole number above 0"),
        ({"head_dim": 128}, "head_dim = 128, and it is qk_rope_head_dim = 64 that is meant by it"),
        ({"num_hidden_layers": 3}, "num_hidden_layers = 3 counts two attentions a layer, so it should be even"),
        ({"tie_word_embedding": True}, "is not a key of longcat_flash that we know"),
    ],
    ids=str,
)
def test_configs_that_are_refused(given, message):
    with pytest.raises(ValueError) as caught:
        build_shapes(LONGCAT_FLASH, read_config(LONGCAT_FLASH, given))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "given", [{"num_layers": 3}, {"num_hidden_layers": 6}, {"num_layers": 3, "num_hidden_layers": 6}]
)
def test_both_words_for_the_number_of_layers(given):
    model = build_shapes(LONGCAT_FLASH, read_config(LONGCAT_FLASH, given))
    assert len(list(model.stack.iter_blocks())) == 3


def test_a_model_may_have_no_experts_without_computation():
    config = read_config(LONGCAT_FLASH, {"num_layers": 1, "zero_expert_num": 0})
    (block,) = build_shapes(LONGCAT_FLASH, config).stack.iter_blocks()
    assert block.mixture.identities == 0 and block.mixture.router.scores.out_size == 512


def test_the_config_of_the_case_has_two_spellings():
    texts = ((CASE / name).read_text() for name in ("config.json", "config_hub.json"))
    written, on_the_hub = (read_config(LONGCAT_FLASH, json.loads(text)) for text in texts)
    assert {**written, "num_key_value_heads": None} == {**on_the_hub, "num_key_value_heads": None}
