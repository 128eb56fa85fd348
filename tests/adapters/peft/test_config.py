"""PEFT's adapter_config.json: options that are not supported raise, and the error names them."""

import json
import shutil

import jax
import pytest

import zoo
from zoo import adapters
from zoo.adapters.peft.config import rank_from_config
from zoo.adapters.peft.targeting import is_targeted


def make_model(layers=2, embed=16, **options):
    sizes = {"vocab": 32, "embed": embed, "layers": layers, "heads": 2, "mlp": 24, **options}
    return zoo.models.Transformer(**sizes, key=jax.random.key(0))


@pytest.fixture(scope="module")
def base():
    return make_model()


@pytest.fixture(scope="module")
def saved(base, tmp_path_factory):
    path = tmp_path_factory.mktemp("saved")
    adapters.save(adapters.lora(base, targets=("query", "down"), rank=2, key=jax.random.key(1)), path)
    return path


def change_config(path, **keys):
    config = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps({**config, **keys}))


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"peft_type": "LORAX"}, "peft_type 'LORAX'; did you mean 'LORA'"),
        ({"peft_type": None}, "Methods that are read: LORA"),
        ({"use_qalora": True}, "use_qalora = True is not computed here; it is read where it is False"),
        ({"bias": "some"}, "bias = 'some' is not read with this method; it is 'none' or 'lora_only' or 'all'"),
        ({"peft_type": "LOHA", "bias": "all", "r": 2}, "is not known|bias = 'all' is not read with this method"),
        ({"r": 0}, "r = 0 should be a rank of at least 1"),
        ({"r": True}, "r = True should be a rank of at least 1"),
        ({"r": "8"}, "r = '8' should be a rank of at least 1"),
        ({"r": 3}, r"lora_A and lora_B of .* are \[2, 16\], \[16, 2\], where \[3, 16\], \[16, 3\] were expected"),
        ({"use_rslora": [1]}, r"use_rslora = \[1\] should be true or false"),
        ({"use_rslora": "false"}, "use_rslora = 'false' should be true or false"),
        ({"use_rslora": 1}, "use_rslora = 1 should be true or false"),
        ({"fan_in_fan_out": 0}, "fan_in_fan_out = 0 should be true or false"),
        ({"use_qalora": 0}, "use_qalora = 0 is not computed here"),
        ({"lora_alpha": float("nan")}, "lora_alpha = nan should be a number"),
        ({"lora_alpha": 1e300}, "lora_alpha = 1e[+]300 should be a number"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern = .* should be a table of patterns and ranks of at least 1"),
        ({"rank_pattern": {"q_proj": 2.5}}, "rank_pattern = .* should be a table of patterns and ranks of at least 1"),
        ({"modules_to_save": "lm_head"}, "modules_to_save = 'lm_head' should be null or a list of words"),
        ({"layers_to_transform": [True]}, "layers_to_transform = .* should be null or a layer number"),
        ({"layers_pattern": "(a+)+"}, "layers_pattern = .* should be the name of a list of layers"),
        ({"target_modules": 3}, "target_modules = 3 should be null or a list of names, or a pattern"),
        ({"target_modules": []}, "target_modules names no module"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights = 'pissa_niter_4' should be one of True, False"),
        ({"lora_alpha": "8"}, "lora_alpha = '8' should be a number"),
        ({"alpha_pattern": {"q_proj": None}}, "alpha_pattern = .* should be a table of patterns and numbers"),
        ({"alpha_pattern": {"(": 2}}, "alpha_pattern has the pattern '\\(', which is not a regular exp.*: missing"),
        ({"rank_pattern": {"(?i)Q_PROJ": 2}}, "rank_pattern has the pattern .*: global flags not at the start"),
        ({"target_modules": "*_proj"}, "target_modules has the pattern .*: nothing to repeat"),
        ({"exclude_modules": "[q"}, "exclude_modules has the pattern '\\[q', which is not a regular expression"),
        ({"rang": 3}, "the key 'rang' is not known"),
        ({"use_dora": True}, "lora_magnitude_vector"),
    ],
)
def test_config_with_unsupported_options_raises(keys, message, base, saved, tmp_path):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    change_config(tmp_path, **keys)
    with pytest.raises(zoo.CheckpointError, match=message):
        adapters.load(base, tmp_path)


@pytest.fixture(scope="module")
def saved_others(tmp_path_factory):
    """A model, and a folder with an adapter of it for each of two methods."""
    model, out = make_model(layers=1), tmp_path_factory.mktemp("saved")
    adapters.save(adapters.oft(model, key=jax.random.key(1), block_size=8), out / "oft")
    adapters.save(adapters.adalora(model, key=jax.random.key(1)), out / "adalora")
    return model, out


@pytest.mark.parametrize(
    ("method", "keys", "message"),
    [
        ("oft", {"coft": True}, "coft = True is not computed here; it is read where it is False"),
        ("oft", {"peft_version": "0.17.1"}, "before PEFT 0.18 its series was another"),
        ("oft", {"num_cayley_neumann_terms": 0}, "num_cayley_neumann_terms = 0 should be a number of at least 1"),
        ("oft", {"block_share": True}, r"oft_R of .* is \[2, 28\], where \[1, 28\] was expected"),
        ("oft", {"oft_block_size": 4}, r"oft_R of .* is \[2, 28\], where \[4, 6\] was expected: .* oft_block_size = 4"),
        ("oft", {"r": 2}, "r = 2 and oft_block_size = 8: one of the two should be 0"),
        ("oft", {"bias": "oft_only"}, "bias = 'oft_only' is not read with this method"),
        ("adalora", {"init_r": 0}, "init_r = 0 should be a rank of at least 1"),
        ("adalora", {"use_dora": True}, "use_dora = True is not computed here"),
    ],
)
def test_config_of_oft_and_adalora_raises(method, keys, message, saved_others, tmp_path):
    model, out = saved_others
    change_config(shutil.copytree(out / method, tmp_path / method), **keys)
    with pytest.raises(zoo.CheckpointError, match=message):
        adapters.load(model, tmp_path / method)


@pytest.mark.parametrize(
    ("pattern", "is_match"),
    [
        ("q_proj", True),
        ("self_attn.q_proj", True),
        ("1.self_attn.q_proj", True),
        ("proj", False),
        ("self_attn", False),
        (r"(q|k)_proj", True),
        (r"layers\.(1|2)\..*", True),
        (r"layers\.[02]\..*", False),
        (r"^model\.layers.*", True),
        (r"^layers.*", False),
        (r"(?>q_)proj", True),
    ],
)
def test_rank_pattern_matches_the_last_parts_of_a_name(pattern, is_match):
    config = {"r": 4, "rank_pattern": {"lm_head": 1, pattern: 2, ".*": 4}}
    assert rank_from_config(config, "model.layers.1.self_attn.q_proj") == (2 if is_match else 4)


@pytest.mark.parametrize(
    ("targets", "is_match"),
    [
        (r".*\.(q|v)_proj", True),
        (r"(?i).*Q_PROJ", True),
        (r"model\.(?!layers\.1).*", False),
        (r"(\w)odel.*\.q_proj", True),
        ("q_proj", False),
        (["q_proj"], True),
        (["(q|v)_proj"], False),
    ],
)
def test_target_modules_are_a_pattern_or_ends_of_names(targets, is_match):
    options = ("exclude_modules", "modules_to_save", "layers_to_transform", "layers_pattern")
    config = {"target_modules": targets, **dict.fromkeys(options)}
    assert is_targeted(config, "model.layers.1.self_attn.q_proj", in_all_linear=False) == is_match
