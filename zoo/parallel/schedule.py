"""Pipeline schedules: which micro-batch each stage takes in each tick, forward and backward, as arrays to run.

p stages, m micro-batches, V rounds. Each stage holds V chunks of the layers, dealt out in turn: stage s has in round v
chunk v p + s of V p. All stages take a tick together (lockstep): at most one forward pass of a chunk, then at most one
backward pass. Between ticks activations move to the next stage, and their gradients to the stage before.

    schedule = zoo.parallel.Schedule("1f1b")
    table = schedule.table(stages=4, microbatches=16, rounds=2)
    table.bubble                                    # 0.086 of the time is idle
"""

import dataclasses
import itertools
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

_NAMES = ("1f1b", "gpipe")
_KEPT = ("inputs", "residuals")

_Ticks = dict[tuple[int, int, int], int]
"""The tick of each (stage, round, micro-batch)."""


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A pipeline schedule: the order in which stages take micro-batches, and what they keep for the backward pass.

    - `name`: "1f1b" (PipeDream-flush, arXiv:2006.09503; with rounds the interleaved schedule of arXiv:2104.04473) or
      "gpipe" (arXiv:1811.06965).
    - `keep`: "inputs" keeps the input of each stage and recomputes its activations in the backward pass; "residuals"
      keeps the residuals and recomputes nothing.

    **Raises** `ValueError` for an unknown `name` or `keep`.
    """

    name: str = "1f1b"
    keep: str = "inputs"

    def __post_init__(self) -> None:
        for field, value, known in (("name", self.name, _NAMES), ("keep", self.keep, _KEPT)):
            if value not in known:
                raise ValueError(f"{field}={value!r}: a schedule's {field} is one of {', '.join(map(repr, known))}")

    def table(self, *, stages: int, microbatches: int, rounds: int = 1) -> "Timetable":
        """Return the timetable for these sizes.

        **Raises** `ValueError` for a size below 1, rounds of "gpipe", and rounds of micro-batches that the stages do
        not divide.
        """
        self._check_sizes(stages, microbatches, rounds)
        if self.name == "gpipe":
            forward, backward = _time_gpipe(stages, microbatches)
        else:
            forward, backward = _time_1f1b(stages, microbatches, rounds)
        return _tabulate(self.name, stages, microbatches, rounds, forward, backward)

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


class Phase(NamedTuple):
    """Ticks `begin` to `end` (exclusive) in which the same kinds of work are done."""

    begin: int
    end: int
    has_forward: bool
    has_backward: bool


class Work(NamedTuple):
    """One pass ("forward" or "backward") of a micro-batch through one chunk of layers on one stage."""

    kind: str
    stage: int
    microbatch: int
    round: int
    start: float
    duration: float


@dataclasses.dataclass(frozen=True, eq=False)
class Timetable:
    """A schedule for given sizes: which micro-batch each stage takes in each tick. Made by `Schedule.table`.

    An entry is (micro-batch, round, slot), or -1 three times where a stage has no work. In `slot` the stage stores the
    chunk's input from the forward pass until the backward pass has read it.

    A stage always takes its neighbor's output in the tick after it was sent. A micro-batch's loss and first backward
    pass are in the tick in which the last stage ends its last round ("gpipe": after all forwards).
    """

    name: str
    stages: int
    microbatches: int
    rounds: int
    num_slots: int
    """Number of inputs that a stage stores: (rounds + 1) stages - 1 for "1f1b", fewer with few micro-batches."""

    forward: Int[np.ndarray, "ticks stages 3"]
    backward: Int[np.ndarray, "ticks stages 3"]

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
        rounds, stage = divmod(chunk, self.stages)
        return np.where(table[:, stage, 1] == rounds, table[:, stage, 0], -1)

    @property
    def phases(self) -> list[Phase]:
        """Runs of ticks with the same kinds of work, in order."""
        kinds = [(bool(f), bool(b)) for f, b in zip(_is_busy(self.forward), _is_busy(self.backward), strict=True)]
        edges = [t for t in range(len(kinds)) if t == 0 or kinds[t] != kinds[t - 1]] + [len(kinds)]
        return [Phase(begin, end, *kinds[begin]) for begin, end in itertools.pairwise(edges)]

    def cost(self, *, forward: float | int = 1, backward: float | int = 2) -> float:
        """Return the time of all ticks in lockstep: in each the stages wait for the kinds of work that any of them has.

        - `forward`, `backward`: time of a micro-batch on one stage, over all of its rounds.
        """
        return float(self._tick_times(forward, backward).sum())

    def _tick_times(self, forward: float | int, backward: float | int) -> Float[np.ndarray, "ticks 2"]:
        """Return the time of the forward and of the backward pass in each tick."""
        busy = np.stack([_is_busy(self.forward), _is_busy(self.backward)], axis=1)
        return busy * np.array([forward, backward]) / self.rounds

    @property
    def bubble(self) -> float:
        """The idle fraction of the stages' time in lockstep: (p - 1) / (m V + p - 1) for "1f1b" and "gpipe"."""
        return 1 - sum(work.duration for work in self.list_work()) / (self.stages * self.cost())

    def list_work(self) -> list[Work]:
        """Return all work with its start and duration, in units of one micro-batch's forward pass on one stage."""
        times = self._tick_times(1, 2)
        starts = np.concatenate([[0.0], times.cumsum()[:-1]]).reshape(times.shape)
        found = []
        for number, (kind, table) in enumerate({"forward": self.forward, "backward": self.backward}.items()):
            for tick, stage in np.argwhere(table[..., 0] >= 0).tolist():
                microbatch, round, _ = table[tick, stage].tolist()
                start = float(starts[tick, number])
                found.append(Work(kind, stage, microbatch, round, start, float(times[tick, number])))
        return found


def _time_1f1b(p: int, m: int, rounds: int) -> tuple[_Ticks, _Ticks]:
    """Return the ticks of all forward and of all backward passes."""
    every = [(s, v, i) for s in range(p) for v in range(rounds) for i in range(m)]
    forward = {(s, v, i): s + i // p * p * rounds + v * p + i % p for s, v, i in every}
    first = p * rounds - 1
    backward = {
        (s, v, i): first + (p - 1 - s) + i // p * p * rounds + (rounds - 1 - v) * p + i % p for s, v, i in every
    }
    return forward, backward


def _time_gpipe(p: int, m: int) -> tuple[_Ticks, _Ticks]:
    """Return the ticks of all forward and of all backward passes."""
    forward = {(s, 0, i): i + s for s in range(p) for i in range(m)}
    last = 2 * (m + p - 1) - 1
    return forward, {key: last - tick for key, tick in forward.items()}


def _tabulate(name: str, stages: int, microbatches: int, rounds: int, forward: _Ticks, backward: _Ticks) -> Timetable:
    """Make the arrays, with a slot for each input: the lowest free one, until the backward pass has read it."""
    ticks = 1 + max(backward.values())
    tables = np.full((2, ticks, stages, 3), -1)
    last_read: list[list[int]] = [[] for _ in range(stages)]  # the tick of each slot of a stage
    for (s, v, i), begin in sorted(forward.items(), key=lambda item: item[1]):
        end = backward[s, v, i]
        reads = last_read[s]
        slot = next((number for number, tick in enumerate(reads) if tick < begin), len(reads))
        reads[slot : slot + 1] = [end]
        tables[0, begin, s] = i, v, slot
        tables[1, end, s] = i, v, slot
    tables.setflags(write=False)
    num_slots = max(len(reads) for reads in last_read)
    return Timetable(name, stages, microbatches, rounds, num_slots, *tables)


def _is_busy(table: Int[np.ndarray, "ticks stages 3"]) -> Bool[np.ndarray, "ticks"]:
    """Return in which ticks any stage has work."""
    return np.any(table[..., 0] >= 0, axis=1)
