"""Pipeline schedules that are drawn for comparison and do not run: ZB-H1 and DualPipe.

Both split the backward pass: gradients of a stage's input, which the stage before waits for, and gradients of its
parameters, which fill idle time. Such a gain needs stages that each go at their own pace; in one program for all
devices a tick lasts as long as its slowest stage.

    ZB-H1      Qi et al., "Zero Bubble Pipeline Parallelism", arXiv:2401.10241
    DualPipe   DeepSeek-AI, "DeepSeek-V3 Technical Report", arXiv:2412.19437
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .schedule_drawing import Work

Ticks = dict[tuple[int, int, int], int]
"""The tick of each (stage, round, micro-batch)."""


class Job(NamedTuple):
    """Work of a stage, without its time."""

    kind: str
    microbatch: int
    round: int
    duration: float
    is_paired: bool = False
    """Overlapped with the next job: the two begin when both inputs are there, and both results are there at the end."""


def time_zero_bubble(p: int, m: int) -> tuple[Ticks, Ticks, Ticks]:
    """Return the ticks of ZB-H1: 1F1B, and on stage s the parameters' gradient comes s micro-batches after the input's.

    In lockstep no stage computes gradients of parameters before the first: (m + p - 1)(F + B) + m W.
    """
    every = [(s, 0, i) for s in range(p) for i in range(m)]
    forward = {(s, v, i): s + i for s, v, i in every}
    backward = {(s, v, i): 2 * (p - 1) - s + i for s, v, i in every}
    return forward, backward, {(s, v, i): 2 * (p - 1) + i for s, v, i in every}


def time_dualpipe(p: int, m: int) -> tuple[Ticks, Ticks, Ticks]:
    """Return the ticks of DualPipe in lockstep: half of the micro-batches enter at each end, directions take turns.

    A "round" is a direction, and every stage holds two chunks: stage s the parameters of s and of p - 1 - s. The
    parity of a tick says the direction: (m + p - 2)(F + B) + m W.
    """
    half = m // 2
    forward, backward, weights = {}, {}, {}
    for s in range(p):
        for i in range(m):
            direction, turn = divmod(i, half)
            chunk = p - 1 - s if direction else s
            forward[s, direction, i] = chunk + 2 * turn
            backward[s, direction, i] = 2 * (p - 1) - chunk + 2 * turn
        of_stage = sorted((tick, key) for key, tick in backward.items() if key[0] == s)
        weights.update({key: 2 * p - 3 + number for number, (_, key) in enumerate(of_stage)})
    return forward, backward, weights


def order_dualpipe(stage: int, p: int, m: int) -> list[Job]:
    """Return the jobs of a stage of DualPipe in the order of the report, mirrored in the second half of the stages.

    A forward that overlaps with a backward of the other direction is paired with it; together they take the sum.
    """
    near = min(stage, p - 1 - stage)
    mirrored = stage >= p // 2
    counts = {"forward": [0, 0], "backward": [0, 0]}
    jobs: list[Job] = []
    waiting: deque[tuple[int, int]] = deque()

    def add(kind: str, side: int, *, split: bool = False, paired: bool = False) -> None:
        direction = side ^ mirrored
        microbatch = direction * (m // 2) + counts[kind][direction]
        counts[kind][direction] += 1
        jobs.append(Job(kind, microbatch, direction, 1.0 if split or kind == "forward" else 2.0, paired))
        if split:
            waiting.append((microbatch, direction))

    def add_weights() -> None:
        jobs.append(Job("weights", *waiting.popleft(), 1.0))

    between = p // 2 - near - 1  # stages from here to the middle
    for _ in range(2 * between):
        add("forward", 0)
    for _ in range(near + 1):
        add("forward", 0)
        add("forward", 1)
    for _ in range(between):
        add("backward", 1, split=True)
        add_weights()
        add("forward", 1)
    for number in range(m // 2 - p + near + 1):
        for side in (0, 1):
            # The first pair of the middle stages is one micro-batch's own forward and backward pass.
            add("forward", side, paired=bool(between or number or side))
            add("backward", 1 - side)
    for _ in range(between):
        add("backward", 1)
        add("forward", 1, paired=True)
        add("backward", 0)
    for number in range(2 * (near + 1)):
        add("backward", 1 - number % 2, split=number > near)
    for _ in range(between):
        add_weights()
        add("backward", 0, split=True)
    for _ in range(near + 1):
        add_weights()
    return jobs


def start_when_ready(orders: Sequence[Sequence[Job]], find_chunk: Callable[[int, int], int]) -> list[Work]:
    """Return the work of stages that each do their jobs in order, every job as soon as its input is there."""
    last = max(find_chunk(stage, job.round) for stage, jobs in enumerate(orders) for job in jobs)
    ends: dict[tuple[str, int, int], float] = {}
    work: list[Work] = []
    free = [0.0] * len(orders)
    waiting = [deque(_join_pairs(jobs)) for jobs in orders]
    while any(waiting):
        before = len(work)
        for stage, groups in enumerate(waiting):
            while groups:
                chunks = [find_chunk(stage, job.round) for job in groups[0]]
                ready = [_find_ready(ends, job, chunk, last) for job, chunk in zip(groups[0], chunks, strict=True)]
                if None in ready:
                    break
                free[stage] = max(free[stage], *(time for time in ready if time is not None))
                group = groups.popleft()
                for job in group:
                    work.append(Work(job.kind, stage, job.microbatch, job.round, free[stage], job.duration))
                    free[stage] += job.duration
                ends |= {(job.kind, n, job.microbatch): free[stage] for job, n in zip(group, chunks, strict=True)}
        if len(work) == before:
            raise RuntimeError(f"stages wait for one another: {[group[0] for group, *_ in filter(None, waiting)]}")
    return work


def _join_pairs(jobs: Sequence[Job]) -> list[tuple[Job, ...]]:
    """Return the jobs in groups that begin together: pairs and single ones."""
    groups: list[tuple[Job, ...]] = []
    for job in jobs:
        if groups and groups[-1][-1].is_paired:
            groups[-1] += (job,)
        else:
            groups.append((job,))
    return groups


def _find_ready(ends: dict[tuple[str, int, int], float], job: Job, chunk: int, last: int) -> float | None:
    """Return when the input of a job is there; None if what makes it has not been timed yet."""
    if job.kind == "forward":
        return ends.get(("forward", chunk - 1, job.microbatch)) if chunk else 0.0
    if job.kind == "backward" and chunk < last:
        return ends.get(("backward", chunk + 1, job.microbatch))
    return ends.get(("forward" if job.kind == "backward" else "backward", chunk, job.microbatch))
