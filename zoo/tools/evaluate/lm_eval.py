"""lm_eval's interface to `LanguageModel`.

Import it to register the model "zoo" with lm_eval. Its own command line then runs as

    python -c "import zoo.tools.evaluate.lm_eval; from lm_eval.__main__ import cli_evaluate; cli_evaluate()" \\
        run --model zoo --model_args pretrained=DIRECTORY,tensor=2 --tasks arc_easy

EleutherAI's Language Model Evaluation Harness, 0.4.13: https://github.com/EleutherAI/lm-evaluation-harness
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from zoo._optional import import_optional
from zoo.generate.request import TRUNCATIONS
from zoo.parallel.devices import make_device_mesh
from zoo.text.chat.errors import ChatError, NoChatTemplateError
from zoo.text.chat.template import ChatTemplate
from zoo.weights.directory import resolve_directory

from .generation import GenerationOptions
from .language_model import LanguageModel, TextPrompt
from .loading import load_language_model

INSTALL = "pip install 'equizoo[eval]'"
_model_api = import_optional("lm_eval.api.model", INSTALL)
_registry = import_optional("lm_eval.api.registry", INSTALL)
_model_utils = import_optional("lm_eval.models.utils", INSTALL)

_KNOWN_OPTIONS = {field.name for field in dataclasses.fields(GenerationOptions)}


@_registry.register_model("zoo")
class ZooLM(_model_api.TemplateLM):
    """A checkpoint for lm_eval, as `--model zoo` or `ZooLM(lm=...)` of a `LanguageModel` that is in memory.

    - `pretrained`, `dtype`, `adapter`, `batch_size`, `max_length`: as in `load_language_model`. `max_batch_size` and
      `device` are lm_eval's, and unused.
    - `max_gen_toks`: new tokens of a task that does not name a number.
    - `axes`: sizes of mesh axes, `tensor=2`.

    With several processes each one runs lm_eval, on the same requests: `LanguageModel` shares the rows out, and lm_eval
    is told of one process.

    **Raises** `ValueError` for anything but one of `pretrained` and `lm`.
    """

    def __init__(
        self,
        pretrained: str | None = None,
        *,
        lm: LanguageModel | None = None,
        batch_size: int | str = 8,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        dtype: str | None = None,
        adapter: str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        **axes: int,
    ):
        super().__init__()
        if (pretrained is None) == (lm is None):
            raise ValueError("pass pretrained=DIRECTORY, or a LanguageModel as lm=")
        if lm is None:
            assert pretrained is not None
            lm = load_language_model(
                pretrained,
                mesh=make_device_mesh(**axes) if axes else None,
                dtype=dtype,
                adapter=adapter,
                batch=int(batch_size),
                length=max_length,
                chat=_has_template(pretrained),
            )
        self.lm = lm
        self.max_gen_toks = max_gen_toks

    @property
    def eot_token_id(self) -> int:
        return next(iter(self.lm.stop_tokens), self.lm.tokenizer.end)

    @property
    def prefix_token_id(self) -> int:
        return self.lm.prefix_token

    @property
    def max_length(self) -> int:
        return self.lm.length

    @property
    def tokenizer_name(self) -> str:
        return f"zoo {self.lm.tokenizer.cache_key}"

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        if add_special_tokens is False:
            return self.lm.tokenizer.encode(string).tolist()
        return self.lm.encode(string)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, Sequence[int], Sequence[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        found = self.lm.log_likelihoods([(context, continuation) for _, context, continuation in requests])
        return [tuple(each) for each in found]  # type: ignore[misc]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        return self.lm.rolling_log_likelihoods([request.args[0] for request in requests])

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        prompts = []
        for request in requests:
            context, options = request.args
            prompts.append(TextPrompt(self.lm.encode(context), _read_options(options, self.max_gen_toks)))
        return self.lm.generate(prompts)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        if not chat_template:
            return None
        return self.lm.require_template().source

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        template = self.lm.require_template()
        options: dict[str, Any] = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": not add_generation_prompt,
        }
        try:
            return template.render(chat_history, **options).text
        except ChatError:  # as lm_eval's Hugging Face model: some templates refuse a system prompt
            asked = [message for message in chat_history if message["role"] != "system"]
            return template.render(asked, **options).text


def _has_template(directory: str) -> bool:
    try:
        ChatTemplate.read(resolve_directory(directory))
    except NoChatTemplateError:
        return False
    return True


def _read_options(given: Mapping[str, Any], max_new_tokens: int) -> GenerationOptions:
    """Return options of a request. **Raises** `NotImplementedError` for one that generation does not know."""
    options = dict(_model_utils.normalize_gen_kwargs(dict(given), max_new_tokens))
    is_sampled = bool(options.pop("do_sample")) and float(options.get("temperature") or 0) > 0
    known = {"max_new_tokens": options.pop("max_gen_toks")}
    known["until"] = tuple(text for text in options.pop("until") if text)
    temperature = float(options.pop("temperature", 0.0) or 0.0)
    if is_sampled:
        known["temperature"] = temperature
    options = {name: value for name, value in options.items() if value is not None}
    if unknown := options.keys() - _KNOWN_OPTIONS:
        raise NotImplementedError(
            f"a task asks to generate with {', '.join(sorted(unknown))}, and zoo knows "
            f"{', '.join(sorted(_KNOWN_OPTIONS))}: change its generation_kwargs"
        )
    if not is_sampled:  # greedy decoding has nothing to truncate
        options = {name: value for name, value in options.items() if name not in TRUNCATIONS}
    return GenerationOptions(**known, **options)
