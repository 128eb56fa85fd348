"""What lm_eval's own Hugging Face model answered: requests, responses and metrics."""

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "fixtures" / "evaluate"
TASKS = ("zoo_choice", "zoo_documents", "zoo_questions")
TOLERANCE = 1e-4


def read_expected() -> dict[str, Any]:
    return json.loads((FOLDER / "lm_eval.json").read_text())


def list_requests(task: str) -> list[tuple[list, Any]]:
    """Return the arguments of each request of a task, and the response."""
    items = read_expected()["items"][task]
    pairs = []
    for item in items:
        pairs += zip(item["arguments"], item["responses"], strict=True)
    return pairs
