"""The recipe as its users run it: from the command line, interrupted, resumed, on one device and on eight."""

import gzip
import importlib.util
import json
import random
import shutil
import signal
import subprocess
import sys
import time

import equinox as eqx
import jax
import pytest

import zoo
from recipes import transformer
from tests.processes import ROOT, make_environment
from tests.recipes.flags import call, flag_names
from tests.recipes.optimization import check_optimization
from zoo import train

RECIPE = ROOT / "recipes" / "transformer.py"
TINY = {
    "embed": 16, "layers": 2, "heads": 4, "mlp_dim": 32, "seq_len": 16, "batch_size": 8, "steps": 60,
    "warmup_steps": 5, "dropout": 0.1, "eval_every": 10,
}  # fmt: skip


def command(text, out, *more, **changes):
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in (TINY | changes).items()]
    return [sys.executable, str(RECIPE), "--data", str(text), "--out", str(out), *flags, *more]


def start(words, **options):
    """On one device, with the compiled programs of the other tests, and what it prints."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(words, env=make_environment(), cwd=ROOT, **pipes, **options)


def finish(process):
    printed, errors = process.communicate(timeout=300)
    return process.returncode, printed, errors


@pytest.fixture(scope="module")
def unbroken(text, tmp_path_factory):
    out = tmp_path_factory.mktemp("unbroken") / "run"
    status, printed, errors = finish(start(command(text, out, "--profile")))
    assert status == 0, errors
    return out, printed


def test_transformer_learns_exports_and_reports(unbroken):
    out, printed = unbroken
    lines = train.read_metrics(out / "metrics.jsonl")
    assert lines[-1]["bits_per_byte"] < 0.8 * lines[0]["bits_per_byte"]
    assert [line["step"] for line in lines if "validation" in line] == [10, 20, 30, 40, 50, 60]
    assert str(out / "report.html") in printed
    assert (
        "60/60" in printed and "tokens/s" in printed and "FLOP/s" in printed and "parameters on one device" in printed
    )
    config = json.loads((out / "config.json").read_text())
    flags = set(flag_names(transformer.main))
    left_out = {"resume", "profile", "watchdog", "no_compile_cache", "deterministic", "checkpoint_url"}
    assert config["embed"] == 16 and set(config) >= flags - left_out
    check_optimization(out)
    report = (out / "report.html").read_text()
    for part in ("layers.*.attention.query.weight", "gradient norm", "learning rate", "def main(", "xz -9e", "<svg"):
        assert part in report
    assert "http" not in report.replace("http://www.w3.org/2000/svg", "")
    assert f"wrote the model to {out / 'export'}" in printed
    exported = zoo.load(out / "export")
    assert exported.embedding.weight.shape == (256, 16) and train.read_tokenizer(out / "export").vocab == 256
    facts = json.loads((out / "export" / "config.json").read_text())
    assert (facts["model_type"], facts["max_position_embeddings"], facts["bos_token_id"]) == ("qwen3", 16, 0)


@pytest.mark.ci
def test_transformer_profile_holds_a_few_steps(unbroken):
    out, printed = unbroken
    assert f"a trace of steps 3 to 7 is in {out / 'profile'}" in printed
    (path,) = (out / "profile").glob("plugins/profile/*/perfetto_trace.json.gz")
    with gzip.open(path, "rt") as file:
        found = json.load(file)["traceEvents"]
    assert [int(x["args"]["step_num"]) for x in found if x.get("name") == "train"] == [3, 4, 5, 6, 7]


def wait_for_checkpoint(process, out):
    while not checkpoints(out) and process.poll() is None:
        time.sleep(0.01)


def checkpoints(out):
    """Those that are finished: what is being written has another name."""
    return [path for path in (out / "checkpoints").glob("*") if path.name.isdigit()]


@pytest.fixture(scope="module")
def killed(text, tmp_path_factory):
    """A run that was killed at a moment that nobody chose, some time after its first checkpoint."""
    out = tmp_path_factory.mktemp("killed") / "run"
    process = start(command(text, out))
    wait_for_checkpoint(process, out)
    time.sleep(random.uniform(0, 0.2))
    process.send_signal(signal.SIGKILL)
    assert finish(process)[0] == -signal.SIGKILL
    return out


@pytest.mark.slow
def test_transformer_killed_and_resumed_is_bitwise_equal(text, unbroken, killed, tmp_path):
    out = shutil.copytree(killed, tmp_path / "run")
    status, _, errors = finish(start(command(text, out, "--resume")))
    assert status == 0, errors
    assert (out / "metrics.jsonl").read_bytes() == (unbroken[0] / "metrics.jsonl").read_bytes()


@pytest.mark.slow
def test_transformer_resumes_on_another_mesh(text, unbroken, killed, tmp_path):
    out = shutil.copytree(killed, tmp_path / "run")
    call(transformer.main, data=(text,), out=out, resume=True, fsdp=2, tensor=2, **TINY)
    expected, lines = (train.read_metrics(folder / "metrics.jsonl") for folder in (unbroken[0], out))
    assert [line["step"] for line in lines] == [line["step"] for line in expected]
    for line, other in zip(lines, expected, strict=True):
        assert line == pytest.approx(other, rel=2e-3)


@pytest.mark.slow  # train/test_moving_between_processes.py sends a signal to the recipe
def test_transformer_saves_on_ctrl_c(text, tmp_path):
    out = tmp_path / "run"
    process = start(command(text, out, steps=100_000))
    wait_for_checkpoint(process, out)
    process.send_signal(signal.SIGINT)
    status, printed, errors = finish(process)
    assert status == 0, errors
    assert "--resume goes on" in printed
    last = train.read_metrics(out / "metrics.jsonl")[-1]["step"]
    assert (out / "checkpoints" / str(last)).is_dir()


@pytest.mark.slow  # in small on a mesh with the other options
def test_transformer_two_default_steps_on_eight_devices(tmp_path):
    call(transformer.main, steps=2, out=tmp_path / "run")
    assert (tmp_path / "run" / "report.html").exists()


@pytest.mark.slow  # the sizes of `make demo`; smaller ones above
def test_transformer_two_default_steps_on_one_device(tmp_path):
    status, printed, errors = finish(start([sys.executable, str(RECIPE), "--steps", "2", "--out", str(tmp_path)]))
    assert status == 0, errors
    assert "886,400 parameters on one device" in printed and (tmp_path / "report.html").exists()


@pytest.mark.slow
def test_transformer_combines_the_other_options(text, tmp_path):
    options = {
        "fsdp": 2,
        "tensor": 2,
        "context": 2,
        "context_attention": "gathered",
        "sequence_parallel": True,
        "dtype": "bfloat16",
        "microbatches": 2,
        "zero_stage": 1,
        "vocab": 300,
    }
    call(transformer.main, data=(text,), out=tmp_path / "run", **TINY | {"steps": 2, "batch_size": 16} | options)
    assert (tmp_path / "run" / "report.html").exists()
    assert train.read_tokenizer(tmp_path / "run" / "export").vocab == 300
    assert zoo.load(tmp_path / "run" / "export").embedding.weight.shape == (300, 16)


@pytest.mark.ci
def test_transformer_branches_off_a_stable_run(text, tmp_path, monkeypatch):
    """As docs/optimizers.md says, with the schedule replaced."""
    stable, branch = tmp_path / "stable", tmp_path / "branch"

    def train_with(decay_steps, **flags):
        def schedule(peak, warmup_steps, steps):
            return train.warmup_stable_decay(peak, warmup_steps, steps, decay_steps)

        monkeypatch.setattr(train, "warmup_cosine", schedule)
        call(transformer.main, data=(text,), **TINY | flags)

    train_with(0, out=stable, steps=30)
    shutil.copytree(stable, branch)
    train_with(4, out=branch, resume=20, steps=24)
    before, after = (train.read_metrics(out / "metrics.jsonl") for out in (stable, branch))
    assert after[:20] == before[:20] and len(after) == 24
    rates = [line["learning_rate"] / 3e-3 for line in after[19:]]
    assert rates == pytest.approx([1, 1, 0.5, 1 - 0.5**0.5, 1 - 0.75**0.5])


def test_transformer_preset_has_the_size_of_its_name():
    assert transformer.PRESETS["cpu"] == transformer.Config()
    large = transformer.PRESETS["1b"]
    sizes = {"vocab": large.vocab, "embed": large.embed, "layers": large.layers, "heads": large.heads}
    sizes["mlp"] = large.mlp_dim
    model = eqx.filter_eval_shape(lambda key: zoo.models.Transformer(**sizes, key=key), jax.random.key(0))
    assert 0.95e9 < sum(x.size for x in jax.tree.leaves(eqx.filter(model, lambda x: hasattr(x, "size")))) < 1.15e9


@pytest.mark.one_case
@pytest.mark.parametrize(
    "more, message",
    [
        (["--stepz", "3"], "Unrecognized options: --stepz"),
        (["--data", "/nowhere/at/all"], "/nowhere/at/all: there is no such file"),
        (["--tensor", "3"], "--tensor 3 takes a multiple of 3 devices, and there are 8: let the flags multiply to"),
        (["--heads", "3"], "embed=16 does not divide evenly over 3 heads"),
        (["--vocab", "100"], "a vocabulary of 100 cannot write every byte"),
        (["--dtype", "float16"], "invalid choice 'float16'"),
        (["--microbatches", "3"], "a batch of 8 rows does not divide evenly over data=8 x 3 microbatches"),
    ],
)
def test_transformer_bad_input_is_one_line(text, tmp_path, capsys, more, message):
    """The last flag of a name counts, as everywhere."""
    _, _, *flags = command(text, tmp_path / "run")
    with pytest.raises(SystemExit) as stopped:
        train.run_cli(transformer.main, transformer.Config, transformer.PRESETS, arguments=[*flags, *more])
    printed, errors = capsys.readouterr()
    assert stopped.value.code == 2
    assert message in " ".join(errors.replace("│", " ").split())
    assert "Traceback" not in errors and "10/60" not in printed


@pytest.mark.slow
def test_transformer_bad_input_ends_a_process_with_status_2(text, tmp_path):
    status, printed, errors = finish(start([*command(text, tmp_path / "run"), "--heads", "3"]))
    assert status == 2
    assert "embed=16 does not divide evenly over 3 heads" in " ".join(errors.split())
    assert "Traceback" not in errors and "10/60" not in printed


def test_transformer_indivisible_batch_raises_early(text, tmp_path):
    with pytest.raises(ValueError, match="12 rows do not divide evenly over data=8. Use a multiple of 8 rows"):
        call(transformer.main, data=(text,), out=tmp_path / "run", **TINY | {"batch_size": 12})
    assert not (tmp_path / "run").exists()


def test_transformer_refuses_binary_data_and_other_checkpoints(text, unbroken, tmp_path):
    (tmp_path / "binary").write_bytes(b"\0\1\2")
    with pytest.raises(ValueError, match="binary: no text there"):
        call(transformer.main, data=(tmp_path / "binary",), out=tmp_path / "run", **TINY)
    with pytest.raises(FileExistsError, match="holds a run of .* resume it"):
        call(transformer.main, data=(text,), out=unbroken[0], **TINY)
    out = shutil.copytree(unbroken[0], tmp_path / "other")
    with pytest.raises(ValueError, match="embedding.weight"):
        call(transformer.main, data=(text,), out=out, resume=True, **TINY | {"embed": 32})
    assert checkpoints(out) == [out / "checkpoints" / path.name for path in checkpoints(unbroken[0])], "nothing is lost"


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["grain", "orbax"])  # without optax the error is Python's own
def test_transformer_without_train_extra_says_what_to_install(missing):
    blocked = (
        "import importlib.util as util, runpy, sys; find = util.find_spec; "
        f"util.find_spec = lambda name, *rest: None if name.startswith({missing!r}) else find(name, *rest); "
        f"runpy.run_path({str(RECIPE)!r}, run_name='__main__')"
    )
    status, _, errors = finish(start([sys.executable, "-c", blocked]))
    assert status != 0
    assert missing in errors and "pip install 'equizoo[train]'" in errors


def test_blocked_packages_are_installed():
    assert all(importlib.util.find_spec(name) for name in ("optax", "grain", "orbax.checkpoint"))
