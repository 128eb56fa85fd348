"""The flags of all recipes: a new one is a line here, and each has an explanation."""

import importlib

import pytest

from tests.processes import ROOT
from tests.recipes.flags import MESH_FLAGS, RUN_FLAGS, flag_names, read_help
from zoo import train

TRAIN = ["batch_size", "steps", "learning_rate", "warmup_steps", "weight_decay", "eval_every", *MESH_FLAGS, *RUN_FLAGS]
TEXT = [*TRAIN, "data", "seq_len"]
READING = [
    *("kind", "field", "chat_template", "chat_date", "train_on", "too_long", "bad_records", "data_processes"),
]
RECORDS = [*TRAIN, "data", *READING, "seq_len", "epochs", "prompts"]
FINETUNE = [*RECORDS, "checkpoint", "lora", "targets", "quantization"]
SIZES = ["vocab", "embed", "layers", "heads", "mlp_dim"]
SWEEP = ["steps", "rates", "num_seeds", "warmup_steps", "weight_decay", "eval_rows", "eval_every"]
FLAGS = {
    "bert": [*TEXT, *SIZES, "held_out"],
    "compare_adapters": [*TEXT, "methods", "ranks", "max_rank", "checkpoint", "pretraining_data", "targets"],
    "diffusion": [*TEXT, *SIZES, "runs", "block", "draws", "block_steps", "order", "temperature"],
    "diloco": [*TEXT, *SIZES, "workers", "periods", "outer_rate", "outer_momentum", "start", "pretrain_steps"],
    "distill": [*RECORDS, "teacher", "student", "layers", "embed", "heads", "alpha", "beta", "temperature"],
    "dpo": [*FINETUNE, "beta", "label_smoothing"],
    "finetune": [*TEXT, "checkpoint", "pretraining_data", "epochs", "prompts"],
    "grpo": [
        *(*TRAIN, "checkpoint", "data", *READING, "reward", "lora", "targets", "updates", "samples", "temperature"),
        *("prompt_len", "max_new_tokens", "eval_prompts"),
    ],
    "image_sft": [*FINETUNE, "train_tower", "held_out"],
    "linear_attention": [*TEXT, "mixers", *SIZES],
    "linearize": [
        *(*TEXT, "mixer", "teacher", "replace", "order", "embed", "layers", "heads"),
        *("recall_share", "recall_vocab", "num_pairs", "teacher_steps", "match_steps", "teacher_rate", "match_rate"),
        "eval_batches",
    ],
    "long_context": [
        *(*TRAIN, "pattern", "num_layers", "vocab", "embed", "heads", "seq_len", "eval_seq_lens", "min_seq_len"),
        *("num_pairs", "num_queries", "eval_rows"),
    ],
    "lora": [
        *(*TEXT, "checkpoint", "pretraining_data", "quantization", "targets", "rank", "epochs", "prompts"),
    ],
    "mamba": [*TEXT, "vocab", "embed", "layers", "state_dim", "head_dim", "expand"],
    "moe": [
        *(*TEXT, "runs", *SIZES, "experts", "top_k", "balance_weight", "bias_rate"),
    ],
    "optimizers": [
        *("data", "optimizers", "rates", "num_seeds", *SIZES[1:], "seq_len", "batch_size", "steps", "warmup_steps"),
        *("weight_decay", "eval_rows", "eval_every", "timed_steps", *RUN_FLAGS),
    ],
    "parallel": [*TEXT, *SIZES],
    "pipeline": [*TEXT, "runs", *SIZES],
    "precision": [*TEXT, "methods", *SIZES],
    "qat": [*TEXT, *SIZES, "formats", "group_size", "start", "start_steps", "start_rate"],
    "recall": ["mixers", "widths", "vocab", "seq_len", "num_pairs", "batch_size", *SWEEP, *RUN_FLAGS],
    "scaling": [
        *("data", "widths", "budgets", "layers", "head_dim", "seq_len", "batch_size", "num_seeds", "learning_rate"),
        *("base_width", "warmup_steps", "decay_share", "weight_decay", "eval_rows", "points", "draws", "save_every"),
        *RUN_FLAGS,
    ],
    "sft": FINETUNE,
    "state_tracking": [
        *("groups", "mixers", *SIZES[1:4], "seq_len", "eval_seq_len", "batch_size", *SWEEP, *RUN_FLAGS),
    ],
    "transformer": [*TEXT, "vocab", "embed", "layers", "heads", "kv_heads", "mlp_dim", "dropout"],
    "translate": [*RECORDS, "embed", "layers", "heads", "mixer", "held_out"],
    "clip": [*TRAIN, "patch_size", "features", "embed", "layers", "heads", "mlp_dim", "held_out"],
    "vit": [*TRAIN, "patch_size", "embed", "layers", "heads", "mlp_dim", "dropout", "held_out"],
}


def test_every_recipe_is_in_the_table():
    assert FLAGS.keys() == {path.stem for path in ROOT.glob("recipes/*.py")}


@pytest.mark.one_case
@pytest.mark.parametrize("name", FLAGS)
def test_flags_are_those_of_the_table_and_explained(name):
    recipe = importlib.import_module(f"recipes.{name}")
    assert sorted(flag_names(recipe.main)) == sorted(FLAGS[name])
    explained = read_help(recipe)
    assert [flag for flag in FLAGS[name] if not explained.get(flag)] == []


def test_help_of_a_preset_has_its_defaults(capsys):
    from recipes import mamba

    with pytest.raises(SystemExit):
        train.run_cli(mamba.main, mamba.Config, mamba.PRESETS, arguments=["1b", "--help"])
    printed = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "32768" in printed and "Presets, as the first word: cpu, 1b" in printed
