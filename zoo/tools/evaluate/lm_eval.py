"""lm_eval's interface to `LanguageModel`, and its tasks.

Import it to register the model "zoo" with lm_eval. Its own command line then runs as

    python -c "import zoo.tools.evaluate.lm_eval; from lm_eval.__main__ import cli_evaluate; cli_evaluate()" \\
        run --model zoo --model_args pretrained=DIRECTORY,tensor=2 --tasks arc_easy

EleutherAI's Language Model Evaluation Harness, 0.4.13: https://github.com/EleutherAI/lm-evaluation-harness
"""

import contextlib
import dataclasses
import difflib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from zoo._optional import import_optional
from zoo.parallel.devices import make_device_mesh
from zoo.text.chat import ChatError, ChatTemplate, NoChatTemplateError
from zoo.weights.directory import resolve_directory

from .generation import GenerationOptions
from .language_model import LanguageModel, TextPrompt
from .loading import load_language_model
from .results import Metric, TaskResult
from .run_tasks import TaskOptions

INSTALL = "pip install 'equizoo[eval]'"
_model_api = import_optional("lm_eval.api.model", INSTALL)
_registry = import_optional("lm_eval.api.registry", INSTALL)
_evaluator = import_optional("lm_eval.evaluator", INSTALL)
_tasks = import_optional("lm_eval.tasks", INSTALL)
_model_utils = import_optional("lm_eval.models.utils", INSTALL)

_BOOTSTRAPS = 1000
"""Resamplings of metrics without a formula for their standard error, which is then within 3% of that of many more."""
_KNOWN_OPTIONS = {field.name for field in dataclasses.fields(GenerationOptions)}
_RECORD_KEYS = ("doc_id", "doc", "target", "arguments", "resps", "filtered_resps", "filter")


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
        return self._require_template().source

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        template = self._require_template()
        options: dict[str, Any] = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": not add_generation_prompt,
        }
        try:
            return template.render(chat_history, **options).text
        except ChatError:  # as lm_eval's Hugging Face model: some templates refuse a system prompt
            asked = [message for message in chat_history if message["role"] != "system"]
            return template.render(asked, **options).text

    def _require_template(self) -> ChatTemplate:
        if self.lm.template is None:
            raise ValueError("a chat was asked for, and there is no chat template: load the model with chat=True")
        return self.lm.template


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
    truncations = ("top_k", "top_p", "min_p")
    if not is_sampled:  # greedy decoding has nothing to truncate
        options = {name: value for name, value in options.items() if name not in truncations}
    return GenerationOptions(**known, **options)


def find_lm_eval_tasks(names: Sequence[str], include_path: Path | None = None) -> Any:
    """Return the `TaskManager` of lm_eval that knows the tasks. `include_path` is a folder of further YAML files.

    **Raises** `ValueError` for a task that it does not know, with the nearest ones; `FileNotFoundError` for a missing
    folder.
    """
    if include_path is not None and not include_path.is_dir():
        raise FileNotFoundError(f"{include_path}: a folder of YAML files of tasks was expected")
    manager = _tasks.TaskManager(include_path=None if include_path is None else str(include_path))
    for name in names:
        if not manager.match_tasks([name]):
            nearest = ", ".join(difflib.get_close_matches(name, manager.all_tasks, 3)) or "none is near"
            raise ValueError(
                f"lm_eval has no task {name!r} ({nearest}): `lm_eval ls tasks` lists all, and --include-path adds a "
                "folder of YAML files"
            )
    return manager


def run_lm_eval(
    lm: LanguageModel,
    names: Sequence[str],
    options: TaskOptions,
    *,
    shots: int | None = None,
    manager: Any = None,
) -> Iterator[list[TaskResult]]:
    """Yield the results of each name, a task or a group of tasks, by lm_eval's `simple_evaluate`.

    `shots` is None for each task's own number. Standard errors are those that lm_eval gives: by formula for means, for
    some other metrics by bootstrap over items, and for the rest none.
    """
    manager = find_lm_eval_tasks(names) if manager is None else manager
    model = ZooLM(lm=lm, max_gen_toks=options.max_new_tokens)
    for name in names:
        with _without_pools(), contextlib.redirect_stdout(sys.stderr):
            found = _evaluator.simple_evaluate(
                model=model,
                tasks=manager.match_tasks([name]),
                num_fewshot=shots,
                limit=options.limit,
                bootstrap_iters=_BOOTSTRAPS,
                apply_chat_template=options.chat,
                task_manager=manager,
                log_samples=True,
            )
        yield _read_results(found)


@contextlib.contextmanager
def _without_pools() -> Iterator[None]:
    """Keep lm_eval from forking processes for its bootstrap, which deadlock where JAX has run."""
    before = os.environ.get("DISABLE_MULTIPROC")
    os.environ["DISABLE_MULTIPROC"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["DISABLE_MULTIPROC"]
        else:
            os.environ["DISABLE_MULTIPROC"] = before


def _read_results(found: Mapping[str, Any]) -> list[TaskResult]:
    results = []
    for name, values in found["results"].items():
        metrics = {}
        for key, value in values.items():
            metric, comma, filtered = key.partition(",")
            if not comma or metric.endswith("_stderr") or isinstance(value, str):
                continue
            error = values.get(f"{metric}_stderr,{filtered}")
            title = metric if filtered == "none" else f"{metric} ({filtered})"
            metrics[title] = Metric(float(value), None if isinstance(error, str | None) else float(error))
        records = [_read_record(sample) for sample in found["samples"].get(name, ())]
        version = found["versions"].get(name)
        results.append(
            TaskResult(
                name,
                _count_items(found, name),
                found["n-shot"].get(name, 0),
                metrics,
                records,
                None if version is None else str(version),
            )
        )
    return results


def _count_items(found: Mapping[str, Any], name: str) -> int:
    """Return the number of items of a task, or of all tasks of a group."""
    counts = found["n-samples"].get(name)
    if counts is not None:
        return counts["effective"]
    return sum(_count_items(found, child) for child in found["group_subtasks"].get(name, ()))


def _read_record(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was asked and answered, and the metrics of an item."""
    names = [*_RECORD_KEYS, *sample.get("metrics", ())]
    return {name: sample[name] for name in names if name in sample}
