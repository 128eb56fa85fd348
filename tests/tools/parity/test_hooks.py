"""`zoo.parity.compare` with real modules of PyTorch, where it is installed."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float

import zoo
from zoo.parallel import Module, buffer
from zoo.parity import compare

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.neighbors


class BatchNorm(Module):
    weight: Float[Array, "features"]
    bias: Float[Array, "features"]
    mean: Float[Array, "features"] = buffer()
    variance: Float[Array, "features"] = buffer()

    def __call__(self, x: Float[Array, "batch features height width"], *, train: bool):
        if not train:
            return self.normalize(x, self.mean, self.variance), self
        mean = x.mean((0, 2, 3))
        variance = x.var((0, 2, 3))
        count = x.size / x.shape[1]
        new = dataclasses.replace(
            self,
            mean=0.9 * self.mean + 0.1 * mean,
            variance=0.9 * self.variance + 0.1 * variance * count / (count - 1),
        )
        return self.normalize(x, mean, variance), new

    def normalize(self, x, mean, variance):
        scale = self.weight * jax.lax.rsqrt(variance + 1e-5)
        return (x - mean[:, None, None]) * scale[:, None, None] + self.bias[:, None, None]


class Convolution(Module):
    weight: Float[Array, "out in height width"]

    def __call__(self, x: Float[Array, "batch in rows columns"]) -> Float[Array, "batch out rows columns"]:
        return jax.lax.conv(x, self.weight, (1, 1), "SAME")


class Net(Module):
    conv: Convolution
    norm: BatchNorm
    head: Float[Array, "classes features"]

    def __call__(self, x: Float[Array, "batch in rows columns"], *, train: bool):
        x, norm = self.norm(self.conv(x), train=train)
        return jax.nn.relu(x).mean((2, 3)) @ self.head.T, dataclasses.replace(self, norm=norm)


class TorchNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = torch.nn.BatchNorm2d(8)
        self.dropout = torch.nn.Dropout(0.0)
        self.head = torch.nn.Linear(8, 5, bias=False)

    def forward(self, x):
        return self.head(self.dropout(torch.relu_(self.norm(self.conv(x)))).mean((2, 3)))


def convert(theirs):
    tensors = {name: jnp.asarray(x.numpy().copy()) for name, x in theirs.state_dict().items()}
    norm = BatchNorm(
        tensors["norm.weight"], tensors["norm.bias"], tensors["norm.running_mean"], tensors["norm.running_var"]
    )
    return Net(Convolution(tensors["conv.weight"]), norm, tensors["head.weight"])


@pytest.mark.parametrize("train", [True, False])
def test_batch_norm_in_both_modes(train):
    """20 batches, with running statistics that move in train mode, and a ReLU in place."""
    torch.manual_seed(0)
    theirs = TorchNet().train(train)
    ours = convert(theirs)
    names = {"conv": "conv", "norm": "norm"}
    batches = np.random.default_rng(0).normal(size=(20, 4, 3, 6, 6))
    for images in batches:
        report = compare(theirs, lambda x, ours=ours: ours(x, train=train)[0], images, names)
        assert report.passed and max(line.error for line in report.comparisons) < 2e-6, report
        assert [line.name for line in report.comparisons] == ["conv", "norm", "result"]
        assert report.notes == (("theirs ran in train mode",) if train else ())
        ours = eqx.filter_jit(ours)(jnp.asarray(images, jnp.float32), train=train)[1]
    for name, x in {"running_mean": ours.norm.mean, "running_var": ours.norm.variance}.items():
        np.testing.assert_allclose(theirs.state_dict()[f"norm.{name}"], x, rtol=1e-5, atol=1e-6)
    assert theirs.training == train and theirs.conv.weight.grad is None


def test_dropout_in_train_mode_is_refused():
    theirs = TorchNet()
    theirs.dropout.p = 0.1
    ours = convert(theirs)
    images = np.ones((1, 3, 4, 4), np.float32)
    with pytest.raises(ValueError, match=r"theirs drew random numbers, .* call theirs\.eval\(\)"):
        compare(theirs, lambda x: ours(x, train=True)[0], images)
    ours = convert(theirs.eval())  # the call above has moved its running statistics
    assert compare(theirs, lambda x: ours(x, train=False)[0], images).passed


def test_bfloat16_and_bound_methods():
    theirs = torch.nn.Linear(4, 3).to(torch.bfloat16)
    weight, bias = (jnp.asarray(x.detach().float().numpy(), jnp.bfloat16) for x in theirs.parameters())
    x = jnp.linspace(-1, 1, 8, dtype=jnp.bfloat16).reshape(2, 4)
    for function in (theirs, theirs.forward):
        assert compare(function, lambda x: x @ weight.T + bias, x, tolerance=1e-2).passed


@pytest.mark.neighbors("transformers")
def test_transformers_model_and_its_conversion():
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
    )
    theirs = transformers.LlamaForCausalLM(config).eval()
    model = zoo.from_torch(theirs)
    names = {
        "model.embed_tokens": "embedding",
        "model.layers.*.self_attn": "layers.*.attention",
        "model.layers.*.mlp.down_proj.input": "layers.*.gated_mlp.down.input",
        "model.layers.*": "layers.*",
        "model.norm": "norm",
    }
    ours = lambda input_ids: {"logits": model(input_ids)}
    report = compare(theirs, ours, {"input_ids": np.arange(16).reshape(2, 8)}, names)
    assert report.passed and len(report.comparisons) == 9, report
    assert max(line.error for line in report.comparisons) < 5e-6
    assert len(report.notes) == 1 and report.notes[0].endswith(" is in theirs only, and not compared")  # the cache
    with torch.no_grad():
        theirs.model.layers[1].mlp.up_proj.weight[0] += 0.1
    report = compare(theirs, ours, {"input_ids": np.arange(16).reshape(2, 8)}, names)
    assert report.first_failure.name == "model.layers.1.mlp.down_proj.input"
