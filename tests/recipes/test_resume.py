"""Every recipe: stopped by a signal and resumed, it writes what an unbroken run writes, bit for bit.

The sizes are as in each recipe's own tests; what goes on besides metrics is named in the table.
"""

import importlib
import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.recipes import (
    test_bert,
    test_clip,
    test_compare_adapters,
    test_diffusion,
    test_diloco,
    test_distill,
    test_dpo,
    test_finetune,
    test_grpo,
    test_image_sft,
    test_linear_attention,
    test_linearize,
    test_long_context,
    test_lora,
    test_mamba,
    test_moe,
    test_optimizers,
    test_parallel,
    test_pipeline,
    test_precision,
    test_qat,
    test_recall,
    test_sft,
    test_state_tracking,
    test_transformer,
    test_translate,
    test_vit,
)
from tests.recipes.flags import call
from zoo import train

WEIGHTS = "export/model.safetensors"
ADAPTER = "adapter/adapter_model.safetensors"


@dataclass(frozen=True)
class Case:
    """A recipe that is stopped in a step of one of its runs, and what it is trained on."""

    flags: dict[str, Any]
    reads: tuple[str, ...] = ("data",)
    run: str | None = None
    step: int = 2
    written: tuple[str, ...] = ()
    """Further files that are equal."""
    marks: tuple = (pytest.mark.slow,)


CI = (pytest.mark.ci,)
TEXT = ("data", "checkpoint", "pretraining_data")
FOUR = {"steps": 4, "eval_every": 2}
"""A run stops after the step that follows the signal, and has to have another one left."""
CASES = {
    "bert": Case(test_bert.TINY | FOUR, written=(WEIGHTS,)),
    "clip": Case(test_clip.TINY | FOUR, (), written=(WEIGHTS,)),
    "compare_adapters": Case(test_compare_adapters.TINY | FOUR, TEXT, run="full", written=("vera-48/" + ADAPTER,)),
    "diffusion": Case(test_diffusion.TINY | {"runs": ("block",), "tensor": 2}, run="block"),
    "diloco": Case(test_diloco.TINY, run="h2"),  # stops after step 3, between two outer steps
    "distill": Case(test_distill.TINY | test_distill.MESH, ("chats", "teacher"), written=(WEIGHTS,)),
    "dpo": Case(test_dpo.TINY | test_dpo.SHARDED, ("pairs", "checkpoint"), written=(WEIGHTS,), marks=CI),
    "finetune": Case(test_finetune.TINY | {"fsdp": 2, "tensor": 2}, TEXT, written=(WEIGHTS,)),
    "grpo": Case(
        test_grpo.TINY | test_grpo.ADAPTED | test_grpo.SHARDED,
        ("prompts", "checkpoint"),
        written=(WEIGHTS, ADAPTER),
        marks=CI,
    ),
    "image_sft": Case(test_image_sft.TINY | FOUR, ("pictures",), written=(WEIGHTS,)),
    "linear_attention": Case(test_linear_attention.TINY, run="gated-delta-net"),
    "linearize": Case(test_linearize.TINY | {"mixer": "mamba2", "replace": (1,)}, run="replaced-1"),
    "long_context": Case(test_long_context.TINY | FOUR, (), run="hybrid"),
    "lora": Case(test_lora.TINY | test_lora.OPTIONS, TEXT, written=(WEIGHTS, ADAPTER), marks=CI),
    "mamba": Case(test_mamba.TINY, written=(WEIGHTS,)),
    "moe": Case(test_moe.TINY | {"runs": ("unbalanced", "loss-free"), "bias_rate": 0.5, "tensor": 2}, run="loss-free"),
    "optimizers": Case(test_optimizers.TINY, run="schedule_free"),
    "parallel": Case(test_parallel.TINY, run="mesh", step=1),
    "pipeline": Case(test_pipeline.TINY | {"runs": ("interleaved",)}, run="interleaved", step=1),
    "precision": Case(test_precision.TINY | {"methods": ("fp8-delayed", "stochastic")}, run="stochastic"),
    "qat": Case(test_qat.TINY, run="int2", written=("int2/" + WEIGHTS,)),
    "recall": Case(test_recall.TINY, (), run="delta-net-8", step=1),
    "sft": Case(
        test_sft.TINY | test_sft.ADAPTED, ("chats", "checkpoint"), step=3, written=(WEIGHTS, ADAPTER), marks=CI
    ),
    "state_tracking": Case(test_state_tracking.TINY, (), run="s3-delta-net-negative", step=1),
    "transformer": Case(test_transformer.TINY | {"steps": 6, "eval_every": 2}, written=(WEIGHTS,)),
    "translate": Case(test_translate.TINY | FOUR, ()),
    "vit": Case(test_vit.TINY | FOUR, (), written=(WEIGHTS,)),
}


@pytest.fixture(scope="module")
def sources(text, start, tmp_path_factory):
    """What the flags of a recipe are set to, by what it reads."""
    folder = tmp_path_factory.mktemp("sources")
    chats, pairs, prompts = ([] for _ in range(3))
    for number in range(200):
        asked, answer, wrong = f"{number} + 1?", str(number + 1), "no"
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        chats.append({"messages": turns})
        pairs.append({"prompt": asked, "chosen": answer, "rejected": wrong})
        prompts.append({"prompt": asked, "answer": number + 1})
    paths = {}
    for name, records in {"chats": chats, "pairs": pairs, "prompts": prompts[:40]}.items():
        paths[name] = folder / f"{name}.jsonl"
        paths[name].write_text("".join(json.dumps(record) + "\n" for record in records))
    rewards = folder / "rewards.py"
    rewards.write_text("def varied(texts, records):\n    return [float(len(set(text)) > 5) for text in texts]\n")
    return {
        "data": {"data": (text,)},
        "pretraining_data": {"pretraining_data": (text,)},
        "checkpoint": {"checkpoint": start},
        "teacher": {"teacher": start},
        "chats": {"data": (str(paths["chats"]),)},
        "pictures": test_image_sft.write_chats(tmp_path_factory.mktemp("pictures")),
        "pairs": {"data": (str(paths["pairs"]),)},
        "prompts": {"data": (str(paths["prompts"]),), "reward": (f"{rewards}:varied",)},
    }


@pytest.mark.usefixtures("without_samples")
@pytest.mark.parametrize("name", [pytest.param(name, marks=case.marks) for name, case in CASES.items()])
def test_stopped_and_resumed_is_the_unbroken_run(name, sources, tmp_path, monkeypatch):
    case = CASES[name]
    main = importlib.import_module(f"recipes.{name}").main
    flags = dict(case.flags)
    for source in case.reads:
        flags |= sources[source]
    unbroken, out = tmp_path / "unbroken", tmp_path / "run"
    call(main, out=unbroken, **flags)
    log = train.Run.log

    def struck(run, **values):
        if run.name == case.run and run.step == case.step and {"loss", "losses", "bits_per_byte"} & values.keys():
            os.kill(os.getpid(), signal.SIGTERM)
        log(run, **values)

    with monkeypatch.context() as patch:
        patch.setattr(train.Run, "log", struck)
        call(main, out=out, **flags)
    assert not any((out / name).exists() for name in ("report.html", "export", "adapter"))
    steps = {path: count_steps(path) for path in out.rglob("metrics.jsonl")}

    taken = set()

    def stepped(run, **values):
        taken.add(run.step)
        assert run.step > steps.get(run.directory / "metrics.jsonl", 0), "what is complete is read back"
        log(run, **values)

    with monkeypatch.context() as patch:
        patch.setattr(train.Run, "log", stepped)
        call(main, out=out, resume=True, **flags)
    assert taken and (out / "report.html").exists()
    metrics = [str(path.relative_to(unbroken)) for path in unbroken.rglob("metrics.jsonl")]
    assert metrics
    for file in (*metrics, *case.written):
        assert (out / file).read_bytes() == (unbroken / file).read_bytes(), file


def count_steps(path: Path) -> int:
    return train.read_metrics(path)[-1]["step"]
