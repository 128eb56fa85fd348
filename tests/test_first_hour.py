"""The first hour of docs/first-hour.md, command by command, from the wheel and a hub on the loopback."""

import json
import os
import re
import subprocess
from pathlib import Path

import jax
import pytest
import tokenizers

import zoo
from tests.installed_wheel import installed
from tests.loopback_hub import Repository, serve_hub
from tests.processes import make_environment

__all__ = ["installed"]

PAGE = Path(__file__).parents[1] / "docs" / "first-hour.md"
NAME = "Qwen/Qwen3-0.6B"
BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ELSEWHERE = ("pip install", "hf upload", f"zoo chat {NAME}\n")
"""What installs, publishes, or waits for somebody to type."""
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A small Qwen3 with random weights, a tokenizer of bytes and special tokens, and a chat template."""
    directory = tmp_path_factory.mktemp("hub") / "model"
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 32, "vocab_size": 260}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    made = zoo.models.preset("qwen3-0.6b", key=jax.random.key(0), **sizes, **heads)
    zoo.save(made, directory, config={"bos_token_id": 256, "eos_token_id": 258})
    level = tokenizers.pre_tokenizers.ByteLevel
    letters = {letter: number for number, letter in enumerate(sorted(level.alphabet()))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=letters, merges=[]))
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.pre_tokenizer = level(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "chat_template": CHATML}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text(json.dumps({"do_sample": True, "eos_token_id": [258]}))
    return directory


def list_steps():
    """Yield kind and source of each block of the page that can run without a person and the world."""
    for kind, source in BLOCK.findall(PAGE.read_text()):
        if not source.startswith(ELSEWHERE):
            yield kind, source


def test_the_page_has_the_steps_of_the_first_hour():
    text = "".join(source for _, source in list_steps())
    for step in (
        "zoo chat",
        "zoo.load(",
        "zoo fork lora",
        "--track tensorboard",
        "adapters.merge",
        "zoo.save(",
        "zoo generate",
    ):
        assert step in text


@pytest.mark.ci
def test_the_first_hour_runs_from_the_wheel(installed, model, tmp_path):
    with serve_hub({NAME: Repository({"main": model})}) as hub:
        environment = make_environment(1)
        environment.pop("PYTHONPATH", None)
        environment |= {
            "PATH": f"{installed}:{os.environ['PATH']}",
            "HF_ENDPOINT": hub.endpoint,
            "HF_HOME": str(tmp_path / "hf"),
            "HF_HUB_OFFLINE": "0",
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
        }
        printed = []
        for kind, source in list_steps():
            program = ["bash", "-euo", "pipefail", "-c"] if kind == "bash" else ["python", "-c"]
            done = subprocess.run(
                [*program, source], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=600
            )
            assert done.returncode == 0, f"{source}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
            printed.append(done.stdout)
    chatted, shown, _, trained, *_ = printed
    assert chatted.count("\n") >= 2
    assert "qwen3 (Qwen3ForCausalLM in transformers)" in shown
    assert "bits per byte" in trained and "wrote the report" in trained
    assert hub.list_downloads().count("model.safetensors") == 1  # once for all
    tuned = tmp_path / "tuned"
    assert json.loads((tuned / "tokenizer_config.json").read_text())["chat_template"] == CHATML
    assert "base_model: Qwen/Qwen3-0.6B" in (tuned / "README.md").read_text()
    assert (tmp_path / "runs" / "mine" / "trackers.json").is_file()
