"""Each stage takes a difference away, and its undo makes it again."""

import numpy as np
import pytest

from zoo.models.hf.config import read_config
from zoo.models.hf.families import FAMILIES
from zoo.models.hf.spec import Origin
from zoo.weights.safetensors import CheckpointError, hold_array
from zoo.weights.stages import (
    Stored,
    drop_lacking,
    map_names,
    note_base_prefix,
    note_lacking,
    rename_older,
    restore_older,
    unwrap,
    wrap,
)

from .damage import LLAMA


def hold(family, names, config=None):
    tensors = {name: hold_array(np.full(2, number)) for number, name in enumerate(names)}
    return Stored(config or {}, tensors, Origin(FAMILIES[family], ""))


def test_the_language_model_is_taken_out_of_its_wrapper():
    around = {"model_type": "llava", "text_config": LLAMA, "tie_word_embeddings": False, "vision_config": {"depth": 2}}
    stored = hold("llama", ["language_model.model.norm.weight", "language_model.lm_head.weight"], around)
    taken = unwrap(stored)
    assert taken.config == {"model_type": "llama", **LLAMA, "tie_word_embeddings": False}
    assert taken.tensors is stored.tensors, "names stay the files' own"
    assert wrap(taken).config == around
    changed = taken.replace(config={**taken.config, "eos_token_id": 2})
    assert wrap(changed).config == {**around, "text_config": {**LLAMA, "eos_token_id": 2}}
    plain = hold("llama", ["model.norm.weight"], LLAMA)
    assert wrap(unwrap(plain)) == plain


def test_older_endings_are_renamed_and_restored():
    names = ["bert.embeddings.LayerNorm.beta", "bert.embeddings.LayerNorm.gamma", "bert.pooler.dense.weight"]
    stored = hold("bert", names)
    renamed = rename_older(stored, "here")
    newer = ["bert.embeddings.LayerNorm.bias", "bert.embeddings.LayerNorm.weight", "bert.pooler.dense.weight"]
    assert [*renamed.tensors] == newer and [*renamed.tensors.values()] == [*stored.tensors.values()]
    assert renamed.notes.older_names == tuple(names[:2])
    assert restore_older(renamed).tensors == stored.tensors
    with pytest.raises(CheckpointError, match="here: .*gamma and .*weight are one tensor, by two names"):
        rename_older(hold("bert", [names[1], newer[1]]), "here")


def test_the_base_prefix_is_left_out_of_the_name_map():
    config = read_config(FAMILIES["llama"], LLAMA)
    whole = map_names(config, Origin(FAMILIES["llama"], ""))
    for names, lacks in ((["model.norm.weight"], False), (["norm.weight"], True), ([], False)):
        noted = note_base_prefix(hold("llama", names), whole)
        assert noted.notes.lacks_base_prefix == lacks
        assert ("norm" in map_names(config, noted.notes)) == lacks


def test_optional_tensors_are_dropped_if_a_file_has_none():
    planned = ["model.norm.weight", "model.layers.0.self_attn.lambda_init"]
    whole = hold("diffllama", planned)
    lacking = note_lacking(hold("diffllama", planned[:1]), planned)
    assert lacking.notes.lacking == (planned[1],)
    assert [*drop_lacking(lacking.replace(tensors=whole.tensors)).tensors] == planned[:1]
    assert note_lacking(whole, planned).notes.lacking == ()
