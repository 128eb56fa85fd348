"""`zoo.summary`: the table of `zoo info` for a model in memory, in shapes, with adapters, quantized, and on a mesh."""

import equinox as eqx
import jax
import pytest

import zoo
from zoo import adapters
from zoo.models import Transformer, list_parameter_paths

SIZES = {"vocab": 64, "embed": 64, "layers": 2, "heads": 4, "kv_heads": 2, "mlp": 128}
TABLE = """\
parameters  78,144, head tied to the embedding
in memory   313 kB of float32
layers      2, scanned as 1 x 2 (layers per pattern x repeats)
cache       520 B per token and row, in float32

parameter                          layers  dims                   shape         dtype     share
embedding: 4,096                                                                          5.24%
  embedding.weight                         vocab embed            64 x 64       float32   5.24%
attention: 24,576                                                                        31.45%
  layers.*.attention.query.weight  0-1     layers heads embed     2 x 64 x 64   float32  10.48%
"""


@pytest.fixture(scope="module")
def model():
    return Transformer(**SIZES, key=jax.random.key(0))


def test_summary_is_printed_as_by_zoo_info(model):
    found = zoo.summary(model)
    assert str(found).startswith(TABLE) and repr(found) == str(found)
    assert found.count == found.num_parameters == zoo.count(model) == sum(row.count for row in found.rows)
    assert [row.name for row in found.rows if row.part == "norms"][-1] == "norm.weight"
    assert {row.name for row in found.rows} == {path.name for path in list_parameter_paths(model)}


def test_summary_takes_shapes_and_any_module(model):
    assert str(zoo.summary(eqx.filter_eval_shape(lambda: model))) == str(zoo.summary(model))
    linear = zoo.summary(zoo.layers.Linear(8, 4, bias=True, key=jax.random.key(0)))
    assert [(row.name, row.shape) for row in linear.rows] == [("weight", (4, 8)), ("bias", (4,))]
    assert linear.cache is None and linear.segments == [] and linear.num_parameters == 36


def test_summary_of_a_mixture_counts_active_parameters():
    found = zoo.summary(eqx.filter_eval_shape(lambda: zoo.models.preset("olmoe-1b-7b", key=jax.random.key(0))))
    assert found.num_parameters == 6_919_161_856 and found.active < 1_300_000_000
    assert f"active      {found.active:,} per token" in str(found)
    assert found.cache["length"] == 4096, "the origin's config has the longest text"


def test_summary_names_trainable_parameters_of_adapters(model):
    adapted = adapters.lora(model, targets="query", rank=4, key=jax.random.key(1))
    found = zoo.summary(adapted)
    assert found.count == zoo.count(adapted) == 1024
    assert str(found).startswith("parameters  79,168, 1,024 of them trainable, head tied")
    assert [row.name.rpartition("query.")[2] for row in found.rows if row.trainable] == [
        "lora.down.weight",
        "lora.up.weight",
    ]


@pytest.mark.parametrize("targets", ["query", "all-linear"])
def test_summary_counts_an_adapted_mixture(targets):
    """A token uses two of four experts, and half of what adapters add to them; routers may be adapted and quantized."""
    sizes = {"vocab": 32, "embed": 16, "layers": 2, "heads": 4, "kv_heads": 2, "mlp": 8, "experts": 4, "top": 2}

    def make():
        key = jax.random.key(0)
        return adapters.lora(zoo.models.MixtureOfExperts(**sizes, key=key), targets=targets, rank=2, key=key)

    adapted = eqx.filter_eval_shape(make)
    found = zoo.summary(adapted)
    of_experts = sum(row.count for row in found.rows if row.trainable and ".experts." in row.name)
    assert (of_experts == 0) == (targets == "query")
    assert found.active == found.count - of_experts // 2 == zoo.models.count_active_parameters(adapted)
    packed = eqx.filter_eval_shape(lambda: adapters.quantize(make(), "int8", targets="scores"))
    assert zoo.summary(packed).active == found.active


def test_summary_counts_quantized_matrices_decoded(model):
    found = zoo.summary(adapters.quantize(model, "int8"))
    assert found.num_parameters == zoo.summary(model).num_parameters
    assert found.bytes < zoo.summary(model).bytes / 2 and "int8" in found.dtypes


def test_summary_on_a_mesh_has_shards(model):
    mesh = zoo.make_mesh(1, 2, tensor=2, devices=jax.devices()[:4])
    found = zoo.summary(model, mesh)
    shards = [x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(zoo.place(model, mesh))]
    assert found.bytes_per_device == sum(shards) and "fsdp 2 x tensor 2: " in str(found)
    with pytest.raises(ValueError, match="do not divide evenly over tensor=3"):
        zoo.summary(model, zoo.make_mesh(1, tensor=3, devices=jax.devices()[:3]))


def test_summary_of_layers_in_rounds_is_that_of_the_model():
    model = Transformer(**{**SIZES, "layers": 4}, key=jax.random.key(0))
    mesh = zoo.make_mesh(1, pipe=2, devices=jax.devices()[:2], layout=zoo.Layout(rounds=2))
    assert str(zoo.summary(zoo.place(model, mesh))) == str(zoo.summary(model))


def test_notebooks_show_a_table(model):
    page = zoo.summary(model)._repr_html_()
    assert page.startswith("<table><tr><td>parameters</td><td>78,144, head tied to the embedding</td></tr>")
    assert "<th>parameter</th><th>layers</th>" in page and page.count("<tr>") == str(zoo.summary(model)).count("\n")
