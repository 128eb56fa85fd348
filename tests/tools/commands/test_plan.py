"""`zoo plan`: what a training run takes, on devices that are not here."""

import dataclasses
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import zoo
from zoo.cli import main
from zoo.parallel.topology import parse_topology
from zoo.tools import plan as planning
from zoo.tools.commands.plan import _parse_count
from zoo.tools.plan.peak import LiveArray, Peak
from zoo.tools.plan.step import Overlap

FIXTURES = Path(__file__).parents[2] / "fixtures"
SMALL = ("plan", "--preset", "qwen3-0.6b", "--seq-len", 128)


@pytest.mark.ci
def test_plan_of_one_mesh(run, monkeypatch):
    plans, plan_training = {}, planning.plan_training

    def plan_once(make, sizes, *rest):
        """Plan a mesh, whose plan is then shown as text and as JSON."""
        name = str(sizes)
        plans[name] = plans[name] if name in plans else plan_training(make, sizes, *rest)
        return plans[name]

    monkeypatch.setattr(planning, "plan_training", plan_once)
    text = run(*SMALL, "--on", "v5p:2x2x2", "--fsdp", -1)[0]
    assert "fsdp 8 on v5p:2x2x2: 8 devices" in text and "fits" in text and "optimizer state" in text
    assert "reduce-scatter" in text and "MFU" in text
    assert "8 devices, 8 rows of 128 tokens, remat full, bfloat16" in text
    assert "within 30% in 48 of 50 compiled steps; --compile asks the compiler" in text and "Suggested" not in text
    assert "/s in turns\n" in text and "training" not in text
    found = json.loads(run(*SMALL, "--on", "v5p:2x2x2", "--fsdp", 8, "--json", "--tokens", "1T")[0])
    assert found["fits"] and found["mesh"]["fsdp"] == 8 and sum(found["memory"].values()) == found["peak"]
    assert found["fits_with_margin"] and found["margin"] == 0.3 and not found["suggested"]
    assert (found["options"]["rows"], found["options"]["seq"], found["options"]["remat"]) == (8, 128, "full")
    for end in ("lower_bound", "sequential"):
        rate = found["tokens_per_second"][end]
        assert rate == pytest.approx(8 * 128 / found["seconds"][end])
        assert found["days"][end] == pytest.approx(1e12 / rate / 86_400)


def test_plan_of_a_directory_reads_its_config_only(run, refused, tmp_path):
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "vocab_size": 256}
    config = {"model_type": "qwen3", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    text = run("plan", tmp_path, "--on", "h100:2", "--fsdp", 2, "--seq-len", 64)[0]
    assert "fsdp 2 on h100:2: 2 devices" in text and "fits" in text
    for words in ((), (tmp_path, "--preset", "qwen3-0.6b")):
        assert "pass a directory" in refused("plan", *words, "--on", "h100:2")


@pytest.mark.parametrize("name", ["gemma3_image", "llava_clip", "paligemma_image"])
def test_plan_counts_the_tower_of_images(run, name):
    folder = FIXTURES / "image_text" / name
    model = zoo.load(folder)
    count = zoo.count(model)
    unread = sum(x.size for x in jax.tree.leaves(model)) - count
    words = ("plan", folder, "--on", "h100:2", "--json")
    found = json.loads(run(*words, "--fsdp", 2, "--seq-len", 32)[0])
    assert 4 * count / 2 <= found["memory"]["parameters"] <= 4 * (count + unread)
    decoding = json.loads(run(*words, "--decode", 2, 32)[0])
    most = 2.2 * count + 4 * unread
    assert 2 * count <= decoding["memory"]["parameters"] < most, "norms and unread layers are float32"
    assert decoding["memory"]["cache"] > 0
    sampling = json.loads(run(*words, "--seq-len", 32, "--rollouts", 2, 32)[0])
    assert sampling["suggested"] and sampling["sampling_memory"]["cache"] > 0
    text = run(*words[:-1], "--data", 2, "--seq-len", 32)[0]
    assert text.endswith("The step is of texts without images: their tower is in memory, and does not run.\n")


def test_plan_without_a_mesh_suggests_one(run):
    text = run(*SMALL, "--on", "h100:2", "--tokens", "1e9")[0]
    assert text.startswith("Suggested mesh: --data 2. Any flag for an axis overrides it; --search compares several.\n")
    assert "data 2 on h100:2: 2 devices, 2 rows of 128 tokens" in text and "1B tokens take at least " in text


@pytest.mark.ci
def test_plan_counts_what_sampling_holds(run, refused):
    words = (*SMALL, "--on", "h100:2", "--fsdp", 2, "--rollouts")
    text = run(*words, 8, 256)[0]
    assert "sampling    8 rows of 256 tokens, " in text and "cache" in text.partition("sampling")[2]
    found = json.loads(run(*words, 8, 256, "--json")[0])
    assert found["sampling_memory"]["cache"] == 4 * 256 * 28 * (2 * 8 * 128 * 2 + 4) + 28 * 4 * (4 + 1)
    assert "0 rows of 256 tokens" in refused(*words, 0, 256)


@pytest.mark.ci
def test_search_marks_what_fits_within_the_error_alone(run, monkeypatch):
    """Of three meshes one fits with a margin, one without, and one not."""
    found = planning.search_meshes(make_small, parse_topology("h100:2"), planning.TrainingOptions(2, 16), limit=3)
    peaks = (40e9, 70e9, 90e9)
    monkeypatch.setattr(
        planning, "search_meshes", lambda *_, **__: [with_peak(*pair) for pair in zip(found, peaks, strict=True)]
    )
    lines = run(*SMALL, "--on", "h100:2", "--search")[0].splitlines()
    assert lines[0] == "2 rows of 128 tokens on h100:2; --rows chooses another number"
    assert lines[2].split()[:3] == ["mesh", "peak", "fits"]
    assert " ".join(lines[2].split()[3:]) == "at least in turns MFU at most in turns bound by"
    assert [re.findall(r" (yes|barely|no) ", line) for line in lines[3:6]] == [["yes"], ["barely"], ["no"]]
    assert lines[6].startswith("barely: ")


def make_small(key):
    return zoo.models.Transformer(vocab=64, embed=16, layers=2, heads=2, mlp=16, key=key)


def test_compiled_plan_compares_the_loops(run, monkeypatch):
    """With `--loop ahead` as well where that may pay, unless a loop is given."""
    options = planning.TrainingOptions(2, 16)
    plan = planning.plan_training(make_small, {"fsdp": 2}, parse_topology("h100:2"), options, model_flops=1)
    plan = dataclasses.replace(plan, overlap=Overlap(0.1, 0.2))
    report = zoo.inspect.compiled(lambda x: x @ x, jnp.ones((4, 4)))
    loops = []

    def compile_training(make, sizes, topology, options, layout):
        loops.append(options.loop)
        return report

    monkeypatch.setattr(planning, "plan_training", lambda *_: plan)
    monkeypatch.setattr(planning.compiled, "compile_training", compile_training)
    words = (*SMALL, "--on", "h100:2", "--fsdp", 2, "--compile")
    text = run(*words)[0]
    assert loops == ["auto", "ahead"] and text.count("\ncompute ") == 3
    assert text.index("Compiled for fsdp 2 on h100:2:") < text.index("Compiled with --loop ahead:")
    assert text.endswith(" by the scan: keep the scan\n")
    found = json.loads(run(*words, "--json")[0])
    assert found["compiled_ahead"] == found["compiled"] and found["overlap"] == {"transfers": 0.1, "products": 0.2}
    loops.clear()
    assert "Compiled with" not in run(*words, "--loop", "scan")[0] and loops == ["scan"]


def with_peak(candidate, peak):
    """Return a candidate whose step takes so many bytes."""
    arrays = (LiveArray(int(peak), (), "float32", "tanh", ""),)
    program = dataclasses.replace(candidate.plan.program, arguments={}, live=Peak(arrays))
    return dataclasses.replace(candidate, plan=dataclasses.replace(candidate.plan, program=program))


def test_plan_that_does_not_fit_exits_with_the_largest(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["plan", "--preset", "llama3-8b", "--on", "h100:8", "--data", "8", "--seq-len", "128"])
    captured = capsys.readouterr()
    assert stopped.value.code == 1 and "DOES NOT FIT" in captured.out
    assert "the largest arrays per device" in captured.err.replace("\n", " ").lower()
    assert "more devices along fsdp" in " ".join(captured.err.split()) and "opt_state" in captured.err


def test_plan_refuses_what_it_cannot_plan(refused):
    assert "is not a known topology" in refused(*SMALL, "--on", "h100")
    assert "fsdp 3 are 3 devices, and h100:8 has 8" in refused(*SMALL, "--on", "h100:8", "--fsdp", 3)
    assert "--data 4 would take them all" in refused(*SMALL, "--on", "h100:8", "--fsdp", 2)
    assert "only one axis may take" in refused(*SMALL, "--on", "h100:8", "--fsdp", -1, "--data", -1)
    assert "leave out --fsdp 8" in refused(*SMALL, "--on", "h100:8", "--fsdp", 8, "--search")
    assert "llama3-8b" in refused("plan", "--preset", "llama9", "--on", "h100:8")
    assert "a number such as 1e12, 300B or 1T, not '1X'" in refused(*SMALL, "--on", "h100:1", "--tokens", "1X")
    assert "nf4 is for a frozen base" in refused(*SMALL, "--on", "h100:1", "--quantization", "nf4")
    words = refused(*SMALL, "--on", "h100:1", "--decode", 1, 64, "--lora", 4, "--search")
    assert "leave out --lora and --search and --seq-len" in words
    words = refused(*SMALL[:3], "--on", "h100:1", "--decode", 1, 64, "--remat", "none", "--loop", "scan")
    assert "leave out --loop and --remat" in words
    assert "plan LoRA on a mesh that you name" in refused(*SMALL, "--on", "h100:2", "--lora", 4, "--search")
    assert "not '1__0'" in refused(*SMALL, "--on", "h100:1", "--tokens", "1__0")
    assert "is not a known topology" in refused(*SMALL, "--on", "rtx4090:2x8")


@pytest.mark.parametrize(
    ("text", "count"), [("1e12", 1e12), ("1T", 1e12), ("2.5B", 2.5e9), ("1_000", 1e3), ("3m", 3e6)]
)
def test_number_of_tokens(text, count):
    assert _parse_count(text) == count


@pytest.mark.ci
def test_qlora_and_decoding_on_one_card(run):
    """The base in 4 bits and float32 adapters; then the model in 4 bits and its cache."""
    sizes = ("--on", "rtx4090:1", "--quantization", "nf4")
    text = run(*SMALL, *sizes, "--lora", 16)[0]
    assert "one device on rtx4090:1, 1 row of 128 tokens, LoRA of rank 16, nf4 base" in text and ": fits" in text
    assert "no product was measured on rtx4090" in text
    text = run(*SMALL[:3], *sizes, "--decode", 2, 512)[0]
    text = " ".join(text.split())  # the first row goes on in a second line
    assert "2 rows of up to 512 tokens, bfloat16, linear layers in nf4" in text
    assert "cache" in text and "within 30%" not in text and "bound by memory" in text
