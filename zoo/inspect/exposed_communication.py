"""Communication that products hide: what runs between the start and the done of each collective.

The text of a scheduled module lists the instructions of a computation in the order in which they run. An asynchronous
collective is on the links from its start on, and the chip waits for it at its done:

    %start = (f32[1,8], f32[8,8]) all-gather-start(%x), ...
    %y = f32[8,8] dot(%u, %v), ...                              hides its seconds of the transfer
    %done = f32[8,8] all-gather-done(%start)                    waits for the rest, which is exposed

    exposed = max(0, link - products)

Link seconds are bytes over the nominal rate of the chip's links (`zoo.inspect.links`), product seconds FLOPs over the
peak rate of their dtype: neither takes less. In detail:

- Loops are followed iteration by iteration. A done may wait for a start in the iteration before.
- Fast links and the network each carry transfers one by one, in the order of their starts. A product's seconds go to
  the oldest transfer that is not complete, and what is left of them to the next.
- Only products count. Norms, softmaxes and copies hide transfers, too, but share the main memory with them. A kernel
  without FLOPs in the HLO counts as 0 seconds.
- A synchronous collective is exposed.
- On TPUs an asynchronous collective is cut up and fused with products: it lasts from the first part to the last.
"""

import dataclasses

import jax

from zoo.parallel.chips import Chip

from .collectives import Collective, is_collective, is_started, list_pieces, parse_groups, read_collective
from .executions import choose_branch, find_trip_count, list_called, list_executions
from .format import Rows
from .hlo import Computation, HloModule, Instruction
from .links import time_groups
from .products import count_product_flops, find_product_dtype, is_product, iterate_fused
from .scopes import find_scope
from .starts import find_starts
from .transfers import TimedTransfer, Totals, Transfers


@dataclasses.dataclass(frozen=True)
class ScheduledCollective:
    """A collective of the schedule, all its executions."""

    bytes: int
    """Bytes per device, loop iterations included: the larger of input and output."""
    times: int
    """Number of executions."""
    kind: str
    """HLO opcode: all-gather, reduce-scatter, ..."""
    axes: tuple[str, ...] | None
    """Mesh axes of the replica groups, as in `Collective`."""
    products: int
    """Number of matrix products that run between start and done, over all executions. A product between the starts and
    dones of two collectives counts for both; its seconds do not."""
    link_seconds: float | None
    """Seconds on the chip's links. None, like the next two, if the chip is unknown."""
    product_seconds: float | None
    """Seconds of these products. If transfers overlap on a link, a product's seconds count for one of them."""
    exposed_seconds: float | None
    """Seconds of the transfers that the products do not cover."""
    instruction: str
    """Name of the start; of the collective, if it is synchronous."""
    phase: str
    """Pass of a gradient: "forward", "backward" or "recomputed"; empty outside of one."""
    scope: str
    """`Decoder/stack/gather`; empty outside of all modules."""
    groups: str
    """Replica groups in HLO notation if `axes` is None; empty otherwise."""


def read_schedule(
    module: HloModule, mesh: jax.sharding.Mesh | None, devices: int, chip: Chip | None, domain: int
) -> Rows[ScheduledCollective] | None:
    """Return the collectives of a program with the products that hide them, the longest exposed first.

    Each `domain` devices in order are joined by fast links. None for a module that is not scheduled. A CPU's module has
    an order, but its threads do not follow it: the result would have no meaning.
    """
    if "is_scheduled=true" not in module.header:
        return None
    walk = _Walk(module, mesh, devices, chip, domain)
    walk.walk(module.entry)
    walk.transfers.finish_all()
    totals = walk.transfers.totals
    rows = [_make_row(module, found, totals[key], chip) for key, found in walk.collectives.items()]
    return Rows(sorted(rows, key=lambda row: (-(row.exposed_seconds or 0), -row.bytes, row.instruction)))


def add_seconds(
    collectives: tuple[Collective, ...], schedule: Rows[ScheduledCollective] | None
) -> tuple[Collective, ...]:
    """Add the seconds of a schedule to the sums by kind and axes."""
    names = ("link_seconds", "product_seconds", "exposed_seconds")
    if not schedule or schedule[0].link_seconds is None:
        return collectives
    added = []
    for total in collectives:
        rows = [row for row in schedule if (row.kind, row.axes, row.groups) == (total.kind, total.axes, total.groups)]
        added.append(dataclasses.replace(total, **{name: sum(getattr(row, name) for row in rows) for name in names}))
    return tuple(added)


def _make_row(module: HloModule, found: "_Found", total: Totals, chip: Chip | None) -> ScheduledCollective:
    one = found.collective
    scope = find_scope(module, found.instruction, found.computation)
    if chip is None:
        seconds = (None, None, None)
    else:
        seconds = (total.times * found.transfer.seconds, total.product_seconds, total.exposed_seconds)
    return ScheduledCollective(
        total.times * one.bytes,
        total.times,
        one.kind,
        one.axes,
        total.products,
        *seconds,
        found.instruction.name,
        scope.phase,
        scope.modules,
        one.groups,
    )


@dataclasses.dataclass(frozen=True)
class _Found:
    """A collective of the program."""

    instruction: Instruction
    computation: Computation
    collective: Collective
    """One execution."""
    transfer: TimedTransfer
    """The same on the links; 0 seconds if the chip is unknown."""


class _Walk:
    """Goes through the instructions of a program in order, and tells `transfers` what starts, ends and multiplies."""

    def __init__(
        self, module: HloModule, mesh: jax.sharding.Mesh | None, devices: int, chip: Chip | None, domain: int
    ) -> None:
        self.module = module
        self.mesh = mesh
        self.devices = devices
        self.chip = chip
        self.domain = domain
        self.collectives: dict[int, _Found] = {}
        self.transfers = Transfers()

    def walk(self, name: str) -> None:
        """Follow the instructions of a computation."""
        computation = self.module.computations.get(name, {})
        last = {
            key: instruction.name
            for instruction in computation.values()
            for key, *_ in list_pieces(self.module, instruction)
        }
        pieces: dict[tuple, int] = {}
        for instruction in computation.values():
            match instruction.opcode:
                case "while":
                    self._walk_loop(instruction, computation)
                case "conditional":
                    for branch in choose_branch(self.module, instruction):
                        self.walk(branch)
                case "call":
                    for called in list_called(instruction):
                        self.walk(called)
                case "async-start" | "call-start":
                    self._walk_asynchronous(instruction)
                case opcode if opcode.endswith("-done"):
                    self.transfers.finish(find_starts(self.module, instruction, computation))
                case "fusion":
                    for key, inner, fused in list_pieces(self.module, instruction):
                        if key not in pieces:
                            pieces[key] = id(inner)
                            transfer = self._make_transfer(inner, fused)
                            self._start(id(inner), [transfer], instruction.name.startswith("async"))
                    self._multiply(instruction, computation)
                    self.transfers.finish([start for key, start in pieces.items() if last[key] == instruction.name])
                case _ if is_collective(instruction):
                    transfer = self._make_transfer(instruction, computation)
                    self._start(id(instruction), [transfer], is_started(instruction))
                case _:
                    self._multiply(instruction, computation)

    def _walk_loop(self, loop: Instruction, computation: Computation) -> None:
        """Follow a loop, an unknown number of iterations as one. An iteration that leaves the links as it found them is
        the same as each after it."""
        trips = find_trip_count(self.module, loop, computation)
        if trips is None:
            trips = 1
        for iteration in range(trips):
            before = self.transfers.copy_totals()
            opened = self.transfers.describe_open()
            for body in loop.called_computations("body"):
                self.walk(body)
            if self.transfers.describe_open() == opened:
                self.transfers.repeat(before, trips - iteration - 1)
                return

    def _walk_asynchronous(self, start: Instruction) -> None:
        """Start the collectives of a computation that runs next to the instructions that follow."""
        transfers = []
        for called in list_called(start):
            for execution in list_executions(self.module, called)[0]:
                if is_collective(execution.instruction):
                    transfers.append(self._make_transfer(execution.instruction, execution.computation))
                else:
                    self._multiply(execution.instruction, execution.computation, execution.times)
        self._start(id(start), transfers, is_started(start))

    def _start(self, start: int, transfers: list[TimedTransfer], asynchronous: bool) -> None:
        if asynchronous:
            self.transfers.start(start, transfers)
        else:
            for transfer in transfers:
                self.transfers.wait(transfer)

    def _make_transfer(self, instruction: Instruction, computation: Computation) -> TimedTransfer:
        """Return an execution of a collective, of which it keeps the description."""
        key = id(instruction)
        if key not in self.collectives:
            one = read_collective(instruction, computation, self.mesh, self.devices)
            seconds = 0.0
            crosses = False
            if self.chip is not None:
                groups = parse_groups(instruction, self.devices) or frozenset([frozenset(range(self.devices))])
                seconds, crosses = time_groups(one.kind, one.bytes, groups, self.domain, self.chip)
            self.collectives[key] = _Found(instruction, computation, one, TimedTransfer(key, seconds, crosses))
        return self.collectives[key].transfer

    def _multiply(self, instruction: Instruction, computation: Computation, times: int = 1) -> None:
        """Cover transfers by the products of an instruction, which may be a fusion."""
        for inner, inside in iterate_fused(self.module, instruction, computation):
            if is_product(inner):
                seconds = 0.0
                if self.chip is not None and (flops := count_product_flops(inner, inside)):
                    seconds = flops / self.chip.rate(find_product_dtype(inner, inside))
                self.transfers.cover(times * seconds, times)
