"""Small checkpoints that read pictures: tokenizers of characters, settings of pictures, and templates as families write
them."""

import json
import shutil
import string
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import tokenizers

FIXTURES = Path(__file__).parent / "fixtures"
GEMMA3 = FIXTURES / "image_text" / "gemma3_image"
CONFIGS = json.loads((FIXTURES / "images" / "configs.json").read_text())
LETTERS = string.ascii_letters + " \n.,?!:<>/"
GEMMA3_SPECIAL = {
    "<pad>": 0,
    "<bos>": 1,
    "<eos>": 2,
    "<unk>": 3,
    "<image_soft_token>": 73,
    "<start_of_image>": 74,
    "<end_of_image>": 75,
    "<start_of_turn>": 76,
    "<end_of_turn>": 77,
}
GEMMA3_CONFIG = {**CONFIGS["gemma3"], "size": {"height": 16, "width": 16}}
GEMMA3_TEMPLATE = """{{ bos_token }}{% for m in messages -%}
<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}
{% if m.content is string %}{{ m.content | trim }}{% else %}{% for part in m.content %}{% if part.type == 'image' -%}
<start_of_image>{% elif part.type == 'text' %}{{ part.text | trim }}{% endif %}{% endfor %}{% endif %}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""


def write_tokenizer(directory: Path, special: dict[str, int], vocab: int = 80, begin: bool = True) -> None:
    """Write a tokenizer of characters with these special tokens, which begins a text with `<bos>`."""
    free = [number for number in range(vocab) if number not in special.values()]
    words = dict(zip(LETTERS, free, strict=False))
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={**words, **special}, merges=[], unk_token="<unk>"))
    tokenizer.add_special_tokens(list(special))
    tokenizer.decoder = tokenizers.decoders.Fuse()
    if begin:
        pair = [("<bos>", special["<bos>"])]
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="<bos> $A", special_tokens=pair)
    tokenizer.save(str(directory / "tokenizer.json"))


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content))


def write_picture(path: Path, seed: int = 0) -> Path:
    """Write a picture of 40 x 30 random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (30, 40, 3), np.uint8)
    PIL.Image.fromarray(pixels).save(path)
    return path


def write_gemma3(directory: Path) -> Path:
    """Write the fixture of Gemma 3 with a tokenizer, a chat template and the settings of pictures."""
    shutil.copytree(GEMMA3, directory, dirs_exist_ok=True)
    write_tokenizer(directory, GEMMA3_SPECIAL)
    write_json(directory / "preprocessor_config.json", GEMMA3_CONFIG)
    write_json(directory / "processor_config.json", {"image_seq_length": 4, "processor_class": "Gemma3Processor"})
    write_json(directory / "tokenizer_config.json", {"bos_token": "<bos>", "eos_token": "<eos>"})
    write_json(directory / "generation_config.json", {"do_sample": False, "eos_token_id": [77]})
    (directory / "chat_template.jinja").write_text(GEMMA3_TEMPLATE)
    return directory
