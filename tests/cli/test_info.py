"""`zoo info`: counts, names, sharding and cache agree with the model that zoo.load returns."""

import dataclasses
import json

import jax
import pytest

import zoo
from tests.command_line import SIZES
from zoo._terminal import align_columns, format_bytes
from zoo.inspect.implementations import format_ranges
from zoo.weights import safetensors


def read_info(run, *words) -> dict:
    return json.loads(run("info", *words, "--json")[0])


@pytest.fixture(scope="module")
def windowed(checkpoint):
    """Two layers of full attention, then three of sliding window attention over 8 tokens."""
    window = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2, "max_position_embeddings": 64}
    return checkpoint("qwen2", vocab_size=32, num_hidden_layers=5, **SIZES, **window)


def test_info_counts_parameters_and_bytes(run, bytes_model):
    found, model = read_info(run, bytes_model), zoo.load(bytes_model)
    assert found["parameters"] == zoo.count(model) == sum(row["parameters"] for row in found["rows"])
    assert sum(row["share"] for row in found["rows"]) == pytest.approx(1)
    assert found["bytes"] == (bytes_model / "model.safetensors").stat().st_size
    assert (found["family"], found["tied"], found["files"]) == ("llama", True, 1)
    assert found["dtypes"] == {"float32": found["parameters"]} and "mesh" not in found


def test_info_merges_layers_of_all_segments(run, windowed):
    found = read_info(run, windowed)
    assert found["segments"] == [[1, 2], [1, 3]]
    rows = {row["name"]: row for row in found["rows"]}
    query = rows["layers.*.attention.query.weight"]
    assert (query["part"], query["layers"], query["shape"]) == ("attention", [0, 1, 2, 3, 4], [5, 16, 16])
    assert query["dims"] == ["layers", "heads", "embed"]
    assert rows["layers.*.ffn_norm.weight"]["part"] == rows["norm.weight"]["part"] == "norms"
    assert {row["part"] for row in found["rows"]} == {"embedding", "attention", "gated_mlp", "norms", "head"}
    assert "5, scanned as 1 x 2 + 1 x 3" in run("info", windowed)[0]


@pytest.mark.parametrize(("data", "fsdp", "tensor"), [(1, 2, 2), (2, 1, 4)])
def test_info_sharding_equals_a_real_mesh(run, bytes_model, data, fsdp, tensor):
    found = read_info(run, bytes_model, "--data", data, "--fsdp", fsdp, "--tensor", tensor)
    mesh = zoo.make_mesh(data, fsdp, tensor=tensor, devices=jax.devices()[: data * fsdp * tensor])
    model = zoo.load(bytes_model, mesh=mesh)
    lying = {
        place.name: ([list(e) if isinstance(e, tuple) else e for e in x.sharding.spec], x.addressable_shards[0].data)
        for place, x in zip(zoo.models.list_parameter_paths(model), jax.tree.leaves(model), strict=True)
    }
    assert {row["name"] for row in found["rows"]} == lying.keys()
    for row in found["rows"]:
        spec, shard = lying[row["name"]]
        assert (row["spec"], row["bytes_per_device"]) == (spec, shard.nbytes)
    assert found["mesh"]["bytes_per_device"] == sum(shard.nbytes for _, shard in lying.values())


def test_info_refuses_a_mesh_that_does_not_divide(refused, bytes_model):
    assert "4 heads do not divide evenly over tensor=3" in refused("info", bytes_model, "--tensor", 3)
    assert "at least 1, not fsdp=0" in refused("info", bytes_model, "--fsdp", 0)
    assert "2 layers do not divide evenly over pipe=4" in refused("info", bytes_model, "--pipe", 4)


def test_info_shards_layers_over_pipe(run, bytes_model):
    found = read_info(run, bytes_model, "--pipe", 2, "--tensor", 2)
    specs = {row["name"]: row["spec"] for row in found["rows"]}
    assert specs["layers.*.attention.query.weight"] == ["pipe", "tensor"]
    assert specs["embedding.weight"] == [["pipe", "tensor"]], "stages share the vocabulary out"


def test_info_takes_context_and_zero_stage(run, bytes_model):
    found = read_info(run, bytes_model, "--context", 4, "--fsdp", 2, "--zero-stage", 1)
    assert (found["mesh"]["context"], found["mesh"]["fsdp"]) == (4, 2)
    assert all(not any(row["spec"]) for row in found["rows"]), "context and stage 1 shard no parameter"


def test_info_recurrent_state_size_is_constant(run):
    found = read_info(run, "--preset", "mamba-130m")["cache"]
    assert found["bytes_per_token"] == 0 and found["bytes_per_row"] == 24 * 1536 * (16 + 3) * 4
    assert "2.8 MB per row, of any length" in run("info", "--preset", "mamba-130m")[0]


def test_info_cache_size_equals_init_state(run, windowed):
    model, found = zoo.load(windowed), read_info(run, windowed)["cache"]

    def taken(length):
        return sum(x.nbytes for x in jax.tree.leaves(model.init_state(1, length)))

    assert found["bytes_per_token"] == taken(5) - taken(4)
    assert (found["length"], found["bytes"], found["dtype"]) == (64, taken(64), "float32")


def test_info_names_tensors(run, gpt2):
    found = read_info(run, gpt2)
    assert found["dtypes"] == {"bfloat16": found["parameters"]} and found["cache"]["dtype"] == "bfloat16"
    rows = {row["name"]: row["tensors"] for row in found["rows"]}
    assert rows["layers.*.attention.key.weight"] == ["transformer.h.*.attn.c_attn.weight (part 2 of 3, transposed)"]
    assert rows["layers.*.attention.key.bias"] == ["transformer.h.*.attn.c_attn.bias (part 2 of 3)"]
    assert rows["embedding.weight"] == ["transformer.wte.weight"]
    text = run("info", gpt2, "--names")[0]
    assert "transformer.h.*.mlp.c_fc.weight (transposed)" in text
    assert "transformer.wte" not in run("info", gpt2)[0]


def test_info_preset_equals_its_checkpoint(run, tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 64}
    found = read_info(run, "--preset", "qwen3-0.6b", "--fsdp", 4, "--tensor", 2)
    assert (found["preset"], found["source"], found["family"]) == ("qwen3-0.6b", "Qwen/Qwen3-0.6B", "qwen3")
    assert found["parameters"] == 596_049_920 == sum(row["parameters"] for row in found["rows"])
    assert found["dtypes"] == {"float32": 596_049_920} and not {"files", "bytes", "tensors"} & found.keys()
    assert found["segments"] == [[1, 28]] and found["tied"]
    assert found["cache"]["bytes_per_token"] == 28 * (2 * 8 * 128 * 4 + 4) and found["cache"]["length"] == 40960

    zoo.save(zoo.models.preset("qwen3-0.6b", key=jax.random.key(0), **sizes), tmp_path)
    other = read_info(run, tmp_path, "--fsdp", 4, "--tensor", 2)
    facts = ("name", "part", "dims", "dtypes", "tensors", "spec")
    assert [[row[x] for x in facts] for row in found["rows"]] == [[row[x] for x in facts] for row in other["rows"]]


def test_info_preset_as_text(run):
    text = run("info", "--preset", "gpt2", "--names")[0]
    assert "gpt2, with the sizes of openai-community/gpt2" in text and "124,439,808, head tied to the embedding" in text
    assert "498 MB of float32" in text and "on disk" not in text
    assert "transformer.h.*.mlp.c_fc.weight (transposed)" in text
    assert "fsdp 2: 249 MB of parameters on each of 2 devices" in run("info", "--preset", "gpt2", "--fsdp", 2)[0]


def test_info_active_parameters_of_a_mixture(run, checkpoint, bytes_model):
    text = run("info", "--preset", "mixtral-8x7b")[0]
    assert "46,702,792,704" in text and "12,879,925,248 per token" in text
    assert "per token, in the experts" not in run("info", bytes_model)[0]
    sizes = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 8}
    directory = checkpoint("dots1", vocab_size=32, num_hidden_layers=2, first_k_dense_replace=1, **SIZES, **sizes)
    model, found = zoo.load(directory), read_info(run, directory)
    assert found["parameters"] == zoo.count(model) == sum(row["parameters"] for row in found["rows"] if row["learnt"])
    assert found["active"] == zoo.models.count_active_parameters(model) == zoo.count(model) - 2 * 3 * 8 * 16
    assert [row["name"].rpartition(".")[2] for row in found["rows"] if not row["learnt"]] == ["selection_bias"]


def test_info_needs_one_model(refused, bytes_model):
    assert "pass a checkpoint directory, or --preset NAME; `zoo presets` lists" in refused("info")
    assert "--preset gpt2 are two models: pass one" in refused("info", bytes_model, "--preset", "gpt2")
    assert "no preset 'llama-3-8b'; nearest are llama3-8b, " in refused("info", "--preset", "llama-3-8b")
    assert "25 heads do not divide evenly over tensor=2" in refused("info", "--preset", "gpt2-xl", "--tensor", 2)


def test_presets_lists_all(run):
    rows = [line.split() for line in run("presets")[0].splitlines()]
    assert [row[0] for row in rows] == list(zoo.models.list_presets())
    assert ["llama3-8b", "8,030,261,248", "llama", "meta-llama/Meta-Llama-3-8B"] in rows


def test_info_reads_headers_only(run, bytes_model, monkeypatch):
    def headers(path, read=safetensors.open_safetensors):
        return {name: dataclasses.replace(tensor, read=unreadable) for name, tensor in read(path).items()}

    def unreadable():
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(safetensors, "open_safetensors", headers)
    run("info", bytes_model)
    with pytest.raises(AssertionError, match="was read"):
        zoo.load(bytes_model)


def test_info_shows_implementations_of_a_platform(run, windowed):
    found = read_info(run, windowed, "--platform", "tpu")["implementations"]
    assert (found["platform"], found["seq_len"]) == ("tpu", 1024)
    layers = [row["layers"] for row in found["rows"] if row["operation"] == "attention"]
    assert sorted(number for numbers in layers for number in numbers) == [0, 1, 2, 3, 4]
    assert "this is compiled for TPU" in run("info", windowed, "--platform", "tpu")[0]
    assert "implementations" not in read_info(run, windowed)


def test_terminal_formats_numbers_and_columns():
    assert [format_bytes(n) for n in (0, 384, 999.6, 2.4712e9, 5e15)] == ["0 B", "384 B", "1 kB", "2.47 GB", "5e+03 TB"]
    assert [format_ranges(n) for n in ([4], range(32), range(0, 8, 2), [0, 1, 2, 5, 6], [0, 2, 3, 5, 9, 10])] == [
        *("4", "0-31", "0-6 by 2", "0-2, 5-6", "6 of 0-10"),
    ]
    assert align_columns([["a", "1"], ["long", "10"], ["a last cell alone"]], right=(1,)) == [
        *("a      1", "long  10", "a last cell alone"),
    ]
