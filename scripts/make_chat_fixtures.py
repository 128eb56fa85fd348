"""Write the reference cases of chat templates: what transformers makes of templates of ours and conversations.

    python scripts/make_chat_fixtures.py            # tests/fixtures/chat/cases.json and its tokenizer

Needs `pip install transformers==5.24.0`; PyTorch is not needed. The folder has the templates, `*.jinja`, next to
`PLAIN_TEMPLATE`, and a byte-level tokenizer with special tokens of all of them. A case of cases.json has

    template, chat, options     file name or "plain", messages by name, options of the rendering
    text, tokens, mask          what `apply_chat_template` returns; mask only with {% generation %} marks and an answer
    raises                      instead of the three: the template refuses these messages
"""

import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tyro

from zoo.text import ChatTemplate
from zoo.text.chat.template import PLAIN_TEMPLATE

try:
    transformers: Any = importlib.import_module("transformers")
    tokenizers: Any = importlib.import_module("tokenizers")
except ImportError:
    transformers = tokenizers = None

FOLDER = Path(__file__).parents[1] / "tests/fixtures/chat"
SPECIAL = [
    *("<s>", "</s>", "<|im_start|>", "<|im_end|>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
]
WORDS = ["the", "and", " the", " is", "assistant", "user", "system", "\n\n", "Hello", " 🙂", "=="]
NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Adds <two> numbers.", "parameters": {"type": "object"}},
}


def say(role: str, content: str | None, **fields: Any) -> dict[str, Any]:
    """Return a message."""
    return {"role": role, "content": content, **fields}


CHATS: dict[str, list[dict[str, Any]]] = {
    "question": [say("user", "What is the sum of 1 and 2?")],
    "answer": [say("user", "Hi"), say("assistant", "Hello!")],
    "turns": [
        say("system", "Be brief & kind."),
        say("user", "Hi <b>é</b>"),
        say("assistant", "Hello! 🙂"),
        say("user", "  1+1?\n\n"),
        say("assistant", " It is 2,\n\nalways.\n"),
    ],
    "letters": [say("user", "λ ✓ 数学 🙃"), say("assistant", "数学🙃\u200dé"), say("user", "?"), say("assistant", "✓")],
    "reasoning": [
        say("user", "2+2?"),
        say("assistant", "4", reasoning_content="two and two"),
        say("user", "3+3?"),
        say("assistant", "6", reasoning_content="three and\nthree"),
    ],
    "tools": [
        say("user", "1 and 2?"),
        say(
            "assistant",
            "I add.",
            tool_calls=[{"type": "function", "function": {"name": "add", "arguments": {"x": 1, "y": "é"}}}],
        ),
        say("tool", "3"),
        say("assistant", "It is 3."),
    ],
}
OPTIONS: dict[str, tuple[dict[str, Any], ...]] = {
    "question": ({}, {"add_generation_prompt": True}),
    "answer": ({}, {"continue_final_message": True}),
    "tools": ({}, {"tools": [TOOL]}),
}


def main(*, out: Path = FOLDER) -> None:
    """Write the cases.

    Args:
        out: Folder for cases.json, tokenizer.json and tokenizer_config.json.
    """
    if transformers is None:
        raise SystemExit("This needs transformers: pip install transformers==5.24.0")
    out.mkdir(parents=True, exist_ok=True)
    make_tokenizer().save(str(out / "tokenizer.json"))
    (out / "tokenizer_config.json").write_text(json.dumps(NAMES, indent=1) + "\n")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(out / "tokenizer.json"), **NAMES)
    cases = [
        apply(tokenizer, name, source, chat, options)
        for name, source in read_templates().items()
        for chat in CHATS
        for options in OPTIONS.get(chat, ({},))
    ]
    lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases)
    versions = json.dumps({"transformers": transformers.__version__, "tokenizers": tokenizers.__version__})
    chats = ",\n".join(f"{json.dumps(name)}: {json.dumps(chat, ensure_ascii=False)}" for name, chat in CHATS.items())
    content = f'{{"versions": {versions},\n"chats": {{\n{chats}\n}},\n"cases": [\n{lines}\n]}}\n'
    (out / "cases.json").write_text(content)
    print(f"{len(cases)} cases, {sum('raises' in case for case in cases)} refused, {len(content) / 1000:.1f} kB")


def read_templates() -> dict[str, str]:
    """Return the templates by name."""
    sources = {path.stem: path.read_text() for path in sorted(FOLDER.glob("*.jinja"))}
    return {**sources, "plain": PLAIN_TEMPLATE}


def make_tokenizer() -> Any:
    """Return a byte-level BPE of all bytes, a few words, and the special tokens."""
    level = tokenizers.pre_tokenizers.ByteLevel
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = level(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.post_processor = tokenizers.processors.ByteLevel(trim_offsets=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=sorted(level.alphabet()), special_tokens=SPECIAL, show_progress=False
    )
    made.train_from_iterator(WORDS * 3, trainer)
    return made


def apply(tokenizer: Any, name: str, source: str, chat: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return one case."""
    case = {"template": name, "chat": chat, "options": dict(options)}
    messages: Sequence[Mapping[str, Any]] = CHATS[chat]
    try:
        text = tokenizer.apply_chat_template(messages, chat_template=source, tokenize=False, **options)
    except Exception as error:  # whatever a template raises
        return {**case, "raises": str(error)}
    has_mask = ChatTemplate(source).marks_generation and options.keys() <= {"tools"}
    made = tokenizer.apply_chat_template(
        messages, chat_template=source, return_dict=True, return_assistant_tokens_mask=has_mask, **options
    )
    case |= {"text": text, "tokens": made["input_ids"]}
    if has_mask and any(made["assistant_masks"]):
        case["mask"] = made["assistant_masks"]
    return case


if __name__ == "__main__":
    tyro.cli(main)
