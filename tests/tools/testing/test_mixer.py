"""`check_mixer` refuses every planted fault by the right name, and passes attention.

Recurrent mixers are checked in tests/layers/recurrent/test_mixers.py.
"""

from functools import partial

import jax
import pytest

import zoo
from tests.tools.testing.planted import FAULTS, Planted, WrongDtypes
from zoo.layers import Attention, Linear
from zoo.ops.attention import reference_attention
from zoo.tools.testing import check_mixer
from zoo.tools.testing.checks import Check, CheckReport, Difference
from zoo.tools.testing.meshes import check_meshes, choose_meshes
from zoo.tools.testing.properties import check_dtypes
from zoo.tools.testing.subject import list_implementations, make_subject
from zoo.tools.testing.texts import Texts

REFUSALS = {
    "later token": ({"causal", "pieces = whole", "decode = read"}, r"output at token \d+ .* depends on token \d+"),
    "other row": (
        {
            "rows separate",
            "causal",
            "padding",
            "packed = separate",
            "pieces = whole",
            "decode = read",
            "mesh = one device",
        },
        "A mean, a norm or a sort is over the batch dim",
    ),
    "padded segment": ({"padding"}, r"outputs behind padding, and without, differ by .* at row \d, position 0"),
    "padded position": (
        {"padding"},
        r"through a state behind padding, and without, differ .* Negative positions are padding",
    ),
    "padding not finite": ({"padding"}, "not finite, and the next layer reads it"),
    "segment": ({"packed = separate"}, "the second document's output at row"),
    "piece": ({"pieces = whole"}, "not that after the last token"),
    "decode": ({"pieces = whole", "decode = read"}, r"one token at a time .* differ by"),
    "mode": ({"modes agree"}, r"with mode='other', and with 'recurrent', differ by"),
    "mesh": ({"mesh = one device"}, r"gradients on tensor 2, and .* the gradient of .* lacks zoo.parallel.reduce"),
    "unused": ({"gradients"}, "the gradient of bias is 0 everywhere"),
}


@pytest.fixture(scope="module")
def mesh():
    return zoo.make_mesh(1, fsdp=2, tensor=2, devices=jax.devices()[:4])


@pytest.mark.slow  # layers/recurrent/test_mixers.py has mixers that pass
def test_check_mixer_passes_the_mixer_without_fault(mesh):
    report = check_mixer(Planted, meshes=[mesh])
    assert report.passed
    assert str(report).startswith("Planted passes 14 checks\nrows separate")
    assert "loss and gradients on fsdp 2 x tensor 2, and on one device" in str(report)


@pytest.mark.one_case
@pytest.mark.parametrize("fault", FAULTS)
def test_check_mixer_refuses_a_planted_fault(fault, mesh):
    names, message = REFUSALS[fault]
    with pytest.raises(AssertionError, match=message) as refusal:
        check_mixer(partial(Planted, fault), meshes=[mesh])
    head, *lines = str(refusal.value).splitlines()
    assert {line.strip().partition(":")[0] for line in lines} == names
    assert head.startswith(f"Planted fails {len(lines)} of 1")


def test_a_report_is_a_table():
    checks = (Check("causal", "gradients", Difference(1e-7, "")), Check("pieces = whole", "", cause="one device"))
    assert str(CheckReport("Mixer", checks)).splitlines() == [
        "Mixer passes 1 checks, 1 not made",
        "causal          1.0e-07  gradients",
        "pieces = whole        -  not checked: one device",
    ]


def test_check_mixer_refuses_other_dtypes():
    (check,) = check_dtypes(make_subject(WrongDtypes(Planted(key=jax.random.key(0)))), Texts(6, 6))
    assert not check.passed
    assert "outputs of bfloat16 inputs are float32" in str(check)
    assert ".h float16[16, 4] after a call" in str(check)


def test_check_mixer_with_one_device_says_what_is_missing(caplog, monkeypatch):
    """No mesh is chosen then, and the report and the log say how to have eight devices."""
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    assert choose_meshes() == []
    (check,) = check_meshes(make_subject(Planted(key=jax.random.key(0))), Texts(6, 6), [])
    assert check.passed and check.difference is None
    assert "is not checked: " in str(check) and "device_count=8" in str(check) and "device_count=8" in caplog.text


@pytest.mark.parametrize(
    ("check", "message"),
    [
        (partial(check_mixer, partial(Linear, 4, 4)), "returned Linear"),
        (partial(check_mixer, Planted, seq_len=4), "a document has 5 tokens or more"),
        (
            partial(check_mixer, Planted, implementations={"kernel": [1]}),
            "kernel is not an option .* Planted, which has mode",
        ),
    ],
)
def test_check_mixer_rejects_what_it_cannot_check(check, message):
    with pytest.raises((TypeError, ValueError), match=message):
        check()


def test_check_mixer_compares_names_and_says_what_it_leaves_out():
    report = check_mixer(partial(zoo.layers.Attention, 8, 2), meshes=[])
    compared = [check.compared for check in report.checks if check.name == "modes agree" and check.difference]
    left_out = [check.cause for check in report.checks if check.name == "modes agree" and not check.difference]
    compared = [each for each in compared if "tokamax" not in each]  # if it is installed
    left_out = [each for each in left_out if "'tokamax' cannot" not in each]
    names = ("blockwise", "grouped", "reference")
    assert sorted(compared) == [
        f"outputs and gradients with implementation={name!r}, and with 'auto'" for name in names
    ]
    assert ["'cudnn' cannot" in left_out[0], "'splash' cannot" in left_out[1], len(left_out)] == [True, True, 2]
    module = zoo.layers.GatedDeltaNet(8, 2, key=jax.random.key(0))
    values = {value: bool(reason) for _, value, reason in list_implementations(module, {})}
    del values["tokamax"]
    assert values == {"pallas": True, "chunked": False, "recurrent": False}


@pytest.mark.slow
def test_check_mixer_passes_attention_in_all_implementations():
    others = {"implementation": [reference_attention]}
    report = check_mixer(partial(Attention, 16, 4, kv_heads=2, window=3, sinks=True), implementations=others)
    assert "with implementation=reference_attention, and with 'auto'" in str(report)


def test_a_decoder_with_edits_is_refused():
    """The checks run the stack by itself, where edits of the model do nothing."""
    make = lambda key: zoo.models.Transformer(vocab=8, embed=8, layers=1, heads=2, mlp=8, key=key)
    with pytest.raises(ValueError, match="a check of a decoder takes the model apart, and an edit of norm"):
        make_subject(zoo.patch(make(jax.random.key(0)), {"norm": lambda x: 2 * x}))
