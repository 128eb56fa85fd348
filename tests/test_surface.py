"""The promised names and their signatures: a change here is a change for every user."""

import inspect
from pathlib import Path

import pytest

import zoo

NAMES = {
    *("init", "make_mesh", "place", "place_batch", "Layout"),
    *("value_and_grad", "value", "spmd", "cross_entropy", "log_probs", "generate", "generate_stream", "prefill"),
    *("trainable", "cast", "count"),
    *("load", "save", "from_torch", "to_torch", "families", "hidden_states", "score", "embed", "CheckpointError"),
    *("set_implementations", "weights"),
    *(
        "adapters",
        "audio",
        "images",
        "inspect",
        "layers",
        "models",
        "ops",
        "parallel",
        "parity",
        "precision",
        "testing",
        "text",
        "tools",
        "__version__",
    ),
    *("configure", "export", "plan", "summary", "twice_differentiable"),
    *("capture", "capture_gradients", "capture_names", "patch", "unpatch"),
}
SIGNATURES = {
    zoo.make_mesh: "data fsdp expert context tensor pipe devices layout",
    zoo.init: "make key mesh",
    zoo.place: "tree mesh",
    zoo.trainable: "model",
    zoo.cast: "model dtype",
    zoo.count: "model",
    zoo.value: "loss_fn mesh has_aux microbatches",
    zoo.value_and_grad: "loss_fn mesh has_aux observe microbatches schedule",
    zoo.spmd: "fn mesh out",
    zoo.cross_entropy: "model batch key z_loss balance router_z indexer predictors over chunk implementation",
    zoo.log_probs: "model batch temperature entropy key chunk",
    zoo.generate: (
        "model tokens max_new_tokens images mask length prefix samples draft draft_tokens mesh callback details "
        "capture key top_k top_p min_p repetition_penalty presence_penalty frequency_penalty logits stop_tokens "
        "stop_sequences temperature"
    ),
    zoo.capture: "function names",
    zoo.capture_gradients: "loss_fn names mesh",
    zoo.capture_names: "model args kwargs",
    zoo.patch: "model edits",
    zoo.unpatch: "model",
    zoo.generate_stream: (
        "model requests rows length details mesh top_k top_p min_p repetition_penalty presence_penalty "
        "frequency_penalty logits stop_tokens stop_sequences"
    ),
    zoo.prefill: "model tokens length mask prefix mesh",
    zoo.load: "directory revision mesh dtype family ignore packed images",
    zoo.save: "model directory family source config shard_bytes",
    zoo.from_torch: "weights config mesh dtype family ignore",
    zoo.to_torch: "model family names",
    zoo.families: "",
    zoo.hidden_states: "model tokens images mask segment_ids positions",
    zoo.embed: "model tokens mask images pooling",
    zoo.plan: "step args on model_flops",
    zoo.export: "model folder mesh platforms batch seq_len length image_size overwrite",
    zoo.summary: "model mesh",
    zoo.twice_differentiable: "model",
    zoo.configure: "model remat loop attention recurrence grouped_matmul routing",
    zoo.set_implementations: "model attention recurrence grouped_matmul",
    zoo.score: "model tokens images spans mask segment_ids positions chunk",
}


def test_public_names():
    assert set(zoo.__all__) == NAMES
    assert all(hasattr(zoo, name) for name in NAMES)


@pytest.mark.parametrize("package", [zoo, zoo.layers, zoo.models, zoo.parallel, zoo.train, zoo.inspect, zoo.tools])
def test_a_name_that_is_not_there_is_an_attribute_error(package):
    assert not hasattr(package, "ConvState") and getattr(package, "Llama", None) is None


def test_signatures():
    for function, names in SIGNATURES.items():
        assert list(inspect.signature(function).parameters) == names.split(), function.__name__


def test_signatures_of_models():
    assert {"vocab", "embed", "layers", "heads", "mlp", "key"} <= set(
        inspect.signature(zoo.models.Transformer).parameters
    )
    assert list(inspect.signature(zoo.models.preset).parameters) == ["name", "key", "changes"]
    assert not inspect.signature(zoo.models.list_presets).parameters
    call = inspect.signature(zoo.models.Decoder.__call__).parameters
    assert list(call) == ["self", "tokens", "mask", "segment_ids", "positions", "key"]


def test_signatures_of_parity():
    signature = lambda function: list(inspect.signature(function).parameters)
    assert signature(zoo.parity.compare) == ["theirs", "ours", "inputs", "names", "tolerance"]
    expected = ["directory", "steps", "loss_fn", "optimizer", "family", "tolerance"]
    assert signature(zoo.parity.compare_training) == expected


def test_change_log_lists_the_promised_names():
    text = (Path(__file__).parents[1] / "CHANGELOG.md").read_text()
    for function in SIGNATURES:
        assert f"`zoo.{function.__name__}`" in text
    for name in ("Transformer", "preset", "list_presets"):
        assert f"`zoo.models.{name}`" in text
