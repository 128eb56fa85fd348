"""Implement `zoo evaluate`."""

import importlib.metadata
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from zoo._compile_cache import enable_compile_cache
from zoo._optional import require_installed
from zoo._processes import initialize, is_first_process
from zoo._terminal import show
from zoo.parallel.devices import make_device_mesh
from zoo.parallel.fingerprint import fingerprint
from zoo.tools.evaluate.bits_per_byte import evaluate_texts, read_texts
from zoo.tools.evaluate.language_model import LanguageModel
from zoo.tools.evaluate.loading import load_language_model
from zoo.tools.evaluate.results import RESULTS_FILE, TaskResult, format_table, summarize_results, write_results
from zoo.tools.evaluate.run_tasks import TaskOptions, evaluate_task
from zoo.tools.evaluate.tasks import Question, Task, read_tasks

_WINDOW = 512
_PACKAGES = ("equizoo", "jax", "jaxlib", "tokenizers", "lm_eval")


def evaluate(
    directory: Annotated[Path, tyro.conf.Positional],
    *,
    data: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="PATH ...")] = (),
    task: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="FILE ...")] = (),
    tasks: Annotated[str, tyro.conf.arg(metavar="NAME,NAME")] = "",
    include_path: Path | None = None,
    shots: int | None = None,
    chat: bool = False,
    max_new_tokens: int = 256,
    adapter: Path | None = None,
    out: Path | None = None,
    length: int | None = None,
    batch: int = 8,
    limit: int | None = None,
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    data_axis: int = 1,
    fsdp: int = 1,
    expert: int = 1,
    context: int = 1,
    tensor: int = 1,
    pipe: int = 1,
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
    no_compile_cache: bool = False,
) -> None:
    """Evaluate a checkpoint: bits per byte of text, tasks of your own, tasks of lm_eval.

    --data: perplexity and bits per byte of text. Each file is one document, split into consecutive windows of --length
    tokens. Every token is scored once: a window starts with the last token of the window before it, as context for its
    first prediction. The tokenizer's prefix (BOS) precedes every window and is not scored. Without such a prefix the
    first token of a file has no context, so neither it nor its bytes are counted.

    --task: tasks in JSON lines. {"question": "2 + 2 =", "choices": [" 3", " 4"], "answer": 1} asks for the likeliest
    choice, and {"question": "2 + 2 =", "answer": "4", "until": ["\\n"]} for a generated text that is the answer.

    --tasks: tasks of lm_eval by name, which needs pip install 'equizoo[eval]'.

    Without tokenizer.json, a vocabulary of 256 means bytes, with token 0 before a document, as in zoo.train.

    Args:
        directory: Checkpoint directory with config.json, safetensors and tokenizer.json, or a name on the Hugging Face
            hub, with @REVISION behind it for another than the newest.
        data: UTF-8 text files, and directories of them. Hidden and binary files are skipped.
        task: Files of JSON lines, one task each.
        tasks: Names of lm_eval's tasks and groups, separated by commas: arc_easy,hellaswag.
        include_path: Folder of YAML files with further tasks for lm_eval.
        shots: Examples before each question. Default: the task's own number with --tasks, else 0.
        chat: Ask tasks by the checkpoint's chat template.
        max_new_tokens: Maximum number of new tokens of an answer, where a task does not say it.
        adapter: Directory or name of a PEFT adapter, which is merged into the model.
        out: Directory for results.json: metrics, every item, versions, and the digest of the model.
        length: Tokens that the model reads at a time: per window of --data, by default 512; longer questions of tasks
            lose tokens on the left, by default beyond the maximum of config.json.
        batch: Windows or requests per batch, over all devices.
        limit: Maximum number of windows, evenly spaced over the text, or of items of each task, the first ones.
            Default: all.
        dtype: Dtype of the parameters and the computation. Default: as stored.
        data_axis: Data parallelism: number of devices that shard the batch. -1 for all remaining devices.
        fsdp: Fully sharded data parallelism: number of devices that shard the parameters and the batch.
        expert: Expert parallelism: devices that share the experts of mixtures out, and the rows.
        context: Context parallelism: number of devices that shard the tokens of a window.
        tensor: Tensor parallelism: number of devices that shard heads, MLP and vocabulary.
        pipe: Pipeline parallelism: number of devices that share the layers out, as stages. Not for generated answers.
        as_json: Print a JSON object.
        no_compile_cache: Compile anew: neither read compiled programs from the user's cache folder nor keep them there.
    """
    if not no_compile_cache:
        enable_compile_cache()
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    _check_source(data, task, names)
    bounds = [("length", length, 2), ("batch", batch, 1), ("limit", limit, 1), ("shots", shots, 0)]
    for name, number, least in [*bounds, ("max-new-tokens", max_new_tokens, 1)]:
        if number is not None and number < least:
            raise ValueError(f"--{name} must be at least {least}")
    given = {"shots": shots, "chat": chat, "out": out, "include-path": include_path}
    if data and (unused := [name for name, value in given.items() if value]):
        raise ValueError(f"--{unused[0]} is for tasks, and --data is text: leave it out, or pass --task or --tasks")
    initialize()
    options = TaskOptions(shots=shots or 0, limit=limit, chat=chat, max_new_tokens=max_new_tokens)
    texts = read_texts(data) if data else []
    files = read_tasks(task)
    _check_tasks(files, options, pipe)
    if include_path is not None and not names:
        raise ValueError("--include-path has tasks for lm_eval, and none is named: pass --tasks NAME")
    if out is not None and (out / RESULTS_FILE).exists():
        raise ValueError(f"{out / RESULTS_FILE} is there already: pass another directory as --out, or remove it")
    manager = None
    if names:
        require_installed("lm_eval", extra="eval")
        from zoo.tools.evaluate.lm_eval_tasks import find_lm_eval_tasks

        manager = find_lm_eval_tasks(names, include_path)
    mesh = make_device_mesh(data=data_axis, fsdp=fsdp, expert=expert, context=context, tensor=tensor, pipe=pipe)
    window = length or _WINDOW
    if data:  # a mesh with context cuts no window short
        shards = 1 if mesh is None else mesh.count_shards("seq")
        length = max(-(-window // shards), 2) * shards
    lm = load_language_model(
        directory,
        mesh=mesh,
        dtype=dtype,
        adapter=adapter,
        batch=batch,
        length=length,
        chat=chat,
        progress=is_first_process(),
    )
    if data:
        bits = evaluate_texts(lm, texts, window, limit)
        _show(bits, _format_bits(bits), as_json)
        return
    facts = {} if out is None else _collect_facts(lm, directory, adapter, options)
    results: list[TaskResult] = []
    for found in _run_tasks(lm, files, names, options, shots, manager):
        results += found
        if out is not None and is_first_process():
            out.mkdir(parents=True, exist_ok=True)
            write_results(out, results, facts)
    _show(summarize_results(results), format_table(results), as_json)


def _check_source(data: Sequence[Path], task: Sequence[Path], names: Sequence[str]) -> None:
    """**Raises** `ValueError` unless there is text or are tasks, and not both."""
    if not (data or task or names):
        raise ValueError("pass --data with text, --task with JSON lines or --tasks with names of lm_eval's tasks")
    if data and (task or names):
        raise ValueError("--data is text, and --task and --tasks are questions: evaluate them one after the other")


def _check_tasks(tasks: Sequence[Task], options: TaskOptions, pipe: int) -> None:
    """**Raises** `ValueError` for too many shots, `NotImplementedError` for answers that a pipeline would generate."""
    for each in tasks:
        each.check_shots(options.shots)
        if pipe != 1 and isinstance(each.items[0], Question):
            raise NotImplementedError(
                f"the answers of {each.name} are generated, and --pipe {pipe} shards layers, whose stages keep no "
                "caches: pass --pipe 1, and shard over data, fsdp, expert, context and tensor"
            )


def _run_tasks(
    lm: LanguageModel,
    tasks: Sequence[Task],
    names: Sequence[str],
    options: TaskOptions,
    shots: int | None,
    manager: Any,
) -> Iterator[list[TaskResult]]:
    """Yield the results of each task, as soon as it is done."""
    for task in tasks:
        yield [evaluate_task(lm, task, options)]
    if names:
        from zoo.tools.evaluate.lm_eval_tasks import run_lm_eval

        yield from run_lm_eval(lm, names, options, shots=shots, manager=manager)


def _collect_facts(lm: LanguageModel, directory: Path, adapter: Path | None, options: TaskOptions) -> dict[str, Any]:
    """Collect what results depend on: the model's digest, versions, and options."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    model = {"directory": directory, "adapter": adapter, "fingerprint": fingerprint(lm.model)}
    return {
        "command": sys.argv,
        "model": model,
        "versions": versions,
        "options": options,
        "length": lm.length,
        "mesh": None if lm.mesh is None else lm.mesh.shape,
    }


def _show(facts: dict[str, Any], text: str, as_json: bool) -> None:
    """Print results, in the first of several processes."""
    if is_first_process():
        show(json.dumps(facts, indent=2) if as_json else text)


def _format_bits(results: dict[str, Any]) -> str:
    return (
        f"{results['bits_per_byte']:.4f} bits per byte, perplexity {results['perplexity']:.4f} "
        f"({results['nats_per_token']:.4f} nats per token)\n"
        f"{results['tokens']:,} tokens, {results['bytes']:,} bytes, {results['windows']:,} windows, "
        f"{results['files']:,} files"
    )
