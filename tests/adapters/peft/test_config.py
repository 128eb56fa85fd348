"""PEFT's adapter_config.json: options that are not supported raise, and the error names them."""

import json

import jax
import pytest

import zoo
from zoo import adapters


def make_model(layers=2, embed=16, **options):
    sizes = {"vocab": 32, "embed": embed, "layers": layers, "heads": 2, "mlp": 24, **options}
    return zoo.models.Transformer(**sizes, key=jax.random.key(0))


@pytest.fixture(scope="module")
def adapted():
    return adapters.lora(make_model(), targets=("query", "down"), rank=2, key=jax.random.key(1))


def change_config(path, **keys):
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
def test_config_with_unsupported_options_raises(keys, message, adapted, tmp_path):
    adapters.save(adapted, tmp_path)
    change_config(tmp_path, **keys)
    with pytest.raises(zoo.CheckpointError, match=message):
        adapters.load(adapters.remove(adapted), tmp_path)


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
def test_config_of_oft_and_adalora_raises(method, keys, message, tmp_path):
    model = make_model(layers=1)
    options = {"block_size": 8} if method == "oft" else {}
    adapters.save(getattr(adapters, method)(model, key=jax.random.key(1), **options), tmp_path)
    change_config(tmp_path, **keys)
    with pytest.raises(zoo.CheckpointError, match=message):
        adapters.load(model, tmp_path)
