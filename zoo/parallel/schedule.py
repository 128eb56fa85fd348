"""Pipeline schedules: which micro-batch each stage takes in each tick, forward and backward, as arrays to run and draw.

p stages, m micro-batches, V rounds. Each stage holds V chunks of the layers, dealt out in turn: stage s has in round v
chunk v p + s of V p. All stages take a tick together (lockstep): at most one forward pass of a chunk, then at most one
backward pass. Between ticks activations move to the next stage, and their gradients to the stage before.

    schedule = zoo.parallel.schedule.Schedule("1f1b")
    table = schedule.table(stages=4, microbatches=16, rounds=2)
    table.bubble                                    # 0.086 of the time is idle
    Path("schedule.svg").write_text(table.svg())
"""

import dataclasses
import heapq
import itertools
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from . import drawn_schedules
from .drawn_schedules import Job, Ticks
from .schedule_drawing import Work, draw_work

_TITLES = {"gpipe": "GPipe", "1f1b": "1F1B", "zero-bubble": "Zero bubble (ZB-H1)", "dualpipe": "DualPipe"}
_DRAWN = ("zero-bubble", "dualpipe")
_KEPT = ("inputs", "residuals")


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A pipeline schedule: the order in which stages take micro-batches, and what they keep for the backward pass.

    - `name`: "1f1b" (PipeDream-flush, arXiv:2006.09503; with rounds the interleaved schedule of arXiv:2104.04473) or
      "gpipe" (arXiv:1811.06965). "zero-bubble" (ZB-H1, arXiv:2401.10241) and "dualpipe" (arXiv:2412.19437) are drawn
      for comparison and do not run.
    - `keep`: "inputs" keeps the input of each stage and recomputes its activations in the backward pass; "residuals"
      keeps the residuals and recomputes nothing.

    **Raises** `ValueError` for an unknown `name` or `keep`.
    """

    name: str = "1f1b"
    keep: str = "inputs"

    def __post_init__(self) -> None:
        for field, value, known in (("name", self.name, _TITLES), ("keep", self.keep, _KEPT)):
            if value not in known:
                raise ValueError(f"{field}={value!r}: a schedule's {field} is one of {', '.join(map(repr, known))}")

    def table(self, *, stages: int, microbatches: int, rounds: int = 1) -> "Timetable":
        """Return the timetable for these sizes.

        **Raises** `ValueError` for a size below 1, rounds of a schedule other than "1f1b", rounds of micro-batches that
        the stages do not divide, and for "dualpipe" with an odd number of stages or micro-batches, or with fewer than
        two micro-batches per stage.
        """
        self._check_sizes(stages, microbatches, rounds)
        if self.name == "1f1b":
            return _tabulate(self.name, stages, microbatches, rounds, *_time_1f1b(stages, microbatches, rounds))
        times = {"gpipe": _time_gpipe, "zero-bubble": drawn_schedules.time_zero_bubble}
        times["dualpipe"] = drawn_schedules.time_dualpipe
        return _tabulate(self.name, stages, microbatches, rounds, *times[self.name](stages, microbatches))

    def check_runs(self) -> None:
        """**Raises** `NotImplementedError` for a schedule that is only drawn: its cost, what to take instead."""
        if self.name not in _DRAWN:
            return
        stages, microbatches = 8, 32

        def cost(name: str, rounds: int = 1) -> str:
            return f"{Schedule(name).table(stages=stages, microbatches=microbatches, rounds=rounds).cost():g}"

        memory = ", twice the parameters" if self.name == "dualpipe" else ""
        raise NotImplementedError(
            f"{self.name!r} is drawn and does not run. Stages that take ticks together wait for one another: with "
            f"{stages} stages and {microbatches} micro-batches it takes {cost(self.name)} units of time{memory}, and a "
            f"backward pass split into two. '1f1b' takes {cost('1f1b')}, with 2 rounds {cost('1f1b', 2)}, with 4 "
            f"{cost('1f1b', 4)}. Take Schedule('1f1b'), with rounds of layers if the bubble is too large."
        )

    def _check_sizes(self, stages: int, microbatches: int, rounds: int) -> None:
        sizes = {"stages": stages, "microbatches": microbatches, "rounds": rounds}
        if bad := [f"{name}={size}" for name, size in sizes.items() if size < 1]:
            raise ValueError(f"{', '.join(bad)}: a pipeline has at least 1 of each")
        if rounds > 1 and self.name != "1f1b":
            raise ValueError(f"rounds={rounds}: {self.name!r} has 1 round, take '1f1b' for more")
        if rounds > 1 and microbatches % stages:
            raise ValueError(
                f"microbatches={microbatches}: with {rounds} rounds micro-batches pass in groups of the {stages} "
                f"stages, so let microbatches be a multiple of {stages}, or rounds 1"
            )
        if self.name == "dualpipe" and (stages % 2 or microbatches % 2 or microbatches < 2 * stages):
            raise ValueError(
                f"stages={stages}, microbatches={microbatches}: 'dualpipe' takes an even number of stages, and of "
                "micro-batches an even number of at least twice the stages"
            )


class Phase(NamedTuple):
    """Ticks `begin` to `end` (exclusive) in which the same kinds of work are done."""

    begin: int
    end: int
    has_forward: bool
    has_backward: bool


@dataclasses.dataclass(frozen=True, eq=False)
class Timetable:
    """A schedule for given sizes: which micro-batch each stage takes in each tick. Made by `Schedule.table`.

    An entry is (micro-batch, round, slot), or -1 three times where a stage has no work. In `slot` the stage stores the
    chunk's input from the forward pass until the backward pass has read it.

    What a stage sends in a tick its neighbor takes in the next tick, never later. Where the last stage ends the last
    round of a micro-batch, its loss and the first backward pass are in the same tick ("gpipe": after all forwards).
    """

    name: str
    stages: int
    microbatches: int
    rounds: int
    num_slots: int
    """Number of inputs that a stage stores: (rounds + 1) stages - 1 for "1f1b", fewer with few micro-batches."""

    forward: Int[np.ndarray, "ticks stages 3"]
    backward: Int[np.ndarray, "ticks stages 3"]
    weights: Int[np.ndarray, "ticks stages 3"]
    """Gradients of parameters where the schedule splits them off the backward pass ("zero-bubble" and "dualpipe")."""

    @property
    def enters(self) -> Int[np.ndarray, "ticks"]:
        """The micro-batch that enters the first chunk in each tick, or -1: the embedding belongs to this tick."""
        return self._find_at(self.forward, 0)

    @property
    def ends(self) -> Int[np.ndarray, "ticks"]:
        """The micro-batch that leaves the last chunk in each tick, or -1: its loss belongs to this tick."""
        return self._find_at(self.forward, self.stages * self.rounds - 1)

    @property
    def returns(self) -> Int[np.ndarray, "ticks"]:
        """The micro-batch whose gradient leaves the first chunk in each tick, or -1: the embedding's gradient."""
        return self._find_at(self.backward, 0)

    def _find_at(self, table: Int[np.ndarray, "ticks stages 3"], chunk: int) -> Int[np.ndarray, "ticks"]:
        if self.name == "dualpipe":
            raise NotImplementedError("'dualpipe': two micro-batches enter in one tick, from both sides; it is drawn")
        rounds, stage = divmod(chunk, self.stages)
        return np.where(table[:, stage, 1] == rounds, table[:, stage, 0], -1)

    def find_chunk(self, stage: int, round: int) -> int:
        """Return how many chunks are before that of a stage and round. Rounds of "dualpipe" are its two directions."""
        if self.name == "dualpipe":
            return self.stages - 1 - stage if round else stage
        return round * self.stages + stage

    @property
    def phases(self) -> list[Phase]:
        """Runs of ticks with the same kinds of work, in order."""
        kinds = [(bool(f), bool(b)) for f, b in zip(_is_busy(self.forward), _is_busy(self.backward), strict=True)]
        edges = [t for t in range(len(kinds)) if t == 0 or kinds[t] != kinds[t - 1]] + [len(kinds)]
        return [Phase(begin, end, *kinds[begin]) for begin, end in itertools.pairwise(edges)]

    def cost(self, *, forward: float | int = 1, backward: float | int = 2, weights: float | int = 1) -> float:
        """Return the time of all ticks in lockstep: in each the stages wait for the kinds of work that any of them has.

        - `forward`, `backward`: time of a micro-batch on one stage, over all of its rounds.
        - `weights`: the part of `backward` that the gradients of parameters take.
        """
        return float(self._tick_times(forward, backward, weights).sum())

    def _tick_times(self, forward: float | int, backward: float | int, weights: float | int) -> np.ndarray:
        """Return the time of each tick for forward, backward and weights."""
        is_split = _is_busy(self.weights).any()
        times = np.array([forward, backward - weights, weights] if is_split else [forward, backward, 0.0])
        busy = np.stack([_is_busy(table) for table in (self.forward, self.backward, self.weights)], 1)
        return busy * times / self.rounds

    @property
    def bubble(self) -> float:
        """The idle fraction of the stages' time in lockstep: (p - 1) / (m V + p - 1) for "1f1b" and "gpipe"."""
        return _find_idle_fraction(self.list_work(), self.stages)

    def list_work(self, *, lockstep: bool = True) -> list[Work]:
        """Return all work with its start and duration, in units of one micro-batch's forward pass on one stage.

        - `lockstep`: True is how the tables run. False lets each stage do its work as soon as the input is there, as
          the papers draw it: in the same order, but for "dualpipe", whose published order is another.
        """
        if not lockstep:
            return drawn_schedules.start_when_ready(self._list_jobs(), self.find_chunk)
        times = self._tick_times(1, 2, 1)
        starts = np.concatenate([[0.0], times.reshape(-1).cumsum()])[:-1].reshape(times.shape)
        return [
            Work(kind, s, int(table[t, s, 0]), int(table[t, s, 1]), float(starts[t, k]), float(times[t, k]))
            for k, (kind, table) in enumerate(self._tables().items())
            for t, s in np.argwhere(table[..., 0] >= 0).tolist()
        ]

    def _list_jobs(self) -> list[list[Job]]:
        """Return the jobs of each stage in order."""
        if self.name == "dualpipe":
            return [
                drawn_schedules.order_dualpipe(stage, self.stages, self.microbatches) for stage in range(self.stages)
            ]
        orders: list[list[Job]] = [[] for _ in range(self.stages)]
        for work in sorted(self.list_work(), key=lambda work: work.start):
            orders[work.stage].append(Job(work.kind, work.microbatch, work.round, work.duration))
        return orders

    def _tables(self) -> Mapping[str, np.ndarray]:
        return {"forward": self.forward, "backward": self.backward, "weights": self.weights}

    def svg(self, *, lockstep: bool = True, width: int = 860) -> str:
        """Draw the work of the stages over time, one row per stage, as a self-contained `<svg>` of this width.

        - `lockstep`: as in `list_work`.
        """
        work = self.list_work(lockstep=lockstep)
        idle = _find_idle_fraction(work, self.stages)
        sizes = f"{self.stages} stages, {self.microbatches} micro-batches"
        sizes += f", {self.rounds} rounds" if self.rounds > 1 else ""
        sizes += ", 2 directions" if self.name == "dualpipe" else ""
        title = f"{_TITLES[self.name]}: {idle:.1%} idle"
        pace = "in lockstep" if lockstep else "each stage at its own pace"
        shades = "directions" if self.name == "dualpipe" else "rounds"
        return draw_work(work, self.stages, title=title, subtitle=(sizes, pace), shades=shades, width=width)


def _time_1f1b(p: int, m: int, rounds: int) -> tuple[Ticks, Ticks, Ticks]:
    every = [(s, v, i) for s in range(p) for v in range(rounds) for i in range(m)]
    forward = {(s, v, i): s + i // p * p * rounds + v * p + i % p for s, v, i in every}
    first = p * rounds - 1
    backward = {
        (s, v, i): first + (p - 1 - s) + i // p * p * rounds + (rounds - 1 - v) * p + i % p for s, v, i in every
    }
    return forward, backward, {}


def _time_gpipe(p: int, m: int) -> tuple[Ticks, Ticks, Ticks]:
    forward = {(s, 0, i): i + s for s in range(p) for i in range(m)}
    last = 2 * (m + p - 1) - 1
    return forward, {key: last - tick for key, tick in forward.items()}, {}


def _tabulate(
    name: str, stages: int, microbatches: int, rounds: int, forward: Ticks, backward: Ticks, weights: Ticks
) -> Timetable:
    """Make the arrays, with a slot for each input: the lowest free one, until the input is last read."""
    ticks = 1 + max([*backward.values(), *weights.values()])
    tables = np.full((3, ticks, stages, 3), -1)
    busy: list[list[tuple[int, int]]] = [[] for _ in range(stages)]  # heaps of (last tick, slot)
    free: list[list[int]] = [[] for _ in range(stages)]
    num_slots = 0
    for (s, v, i), begin in sorted(forward.items(), key=lambda item: item[1]):
        while busy[s] and busy[s][0][0] < begin:
            heapq.heappush(free[s], heapq.heappop(busy[s])[1])
        slot = heapq.heappop(free[s]) if free[s] else len(busy[s])
        num_slots = max(num_slots, slot + 1)
        heapq.heappush(busy[s], (weights.get((s, v, i), backward[s, v, i]), slot))
        for table, times in zip(tables, (forward, backward, weights), strict=True):
            if (s, v, i) in times:
                table[times[s, v, i], s] = i, v, slot
    tables.setflags(write=False)
    return Timetable(name, stages, microbatches, rounds, num_slots, *tables)


def _is_busy(table: Int[np.ndarray, "ticks stages 3"]) -> Bool[np.ndarray, "ticks"]:
    """Return in which ticks any stage has work."""
    return np.any(table[..., 0] >= 0, axis=1)


def _find_idle_fraction(work: list[Work], stages: int) -> float:
    span = max(x.start + x.duration for x in work)
    return 1 - sum(x.duration for x in work) / (stages * span)
