"""Evaluate language models: likelihoods and generated texts for any number of requests, on tasks of your own in JSON
lines, and on the tasks of lm_eval.

    from zoo.tools import evaluate
    lm = evaluate.load_language_model("Qwen/Qwen3-0.6B")
    lm.log_likelihoods([lm.encode_pair("The capital of France is", " Paris")])
    (task,) = evaluate.read_tasks(["arithmetic.jsonl"])
    evaluate.evaluate_task(lm, task, evaluate.TaskOptions(shots=2)).metrics

`zoo.tools.evaluate.lm_eval` is lm_eval's interface to it, and `zoo.tools.evaluate.lm_eval_tasks` runs its tasks. Both
need that package.
"""

from .generation import GenerationOptions
from .language_model import LanguageModel, TextPrompt
from .loading import load_language_model
from .run_tasks import TaskOptions, evaluate_task, run_tasks
from .tasks import read_tasks

__all__ = [
    "GenerationOptions",
    "LanguageModel",
    "TaskOptions",
    "TextPrompt",
    "evaluate_task",
    "load_language_model",
    "read_tasks",
    "run_tasks",
]
