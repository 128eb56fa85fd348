"""Instructions that a compiled program executes, and how often: loops are multiplied out."""

import dataclasses
import re

from .hlo import Computation, HloModule, Instruction, count_instruction_bytes

_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


@dataclasses.dataclass(frozen=True)
class Execution:
    """An executed instruction; `times` is the product of the trip counts of the enclosing loops."""

    instruction: Instruction
    computation: Computation
    times: int
    asynchronous: bool = False
    """True inside an `async-start`, whose instructions run at the same time as the instructions that follow it."""


def list_executions(module: HloModule, name: str | None = None) -> tuple[list[Execution], list[str]]:
    """List executed instructions, with fusions as one, and the names of loops without a known trip count: of the
    program, or of one computation and those that it calls.

    Such a loop counts as one iteration; of a conditional, the branch that moves most bytes counts.
    """
    endless: list[str] = []
    return _list_executions(module, name or module.entry, 1, False, endless), endless


def _list_executions(
    module: HloModule, name: str, times: int, asynchronous: bool, endless: list[str]
) -> list[Execution]:
    """List the executed instructions of a computation, and append the names of its loops without a trip count."""
    executions = []
    computation = module.computations.get(name, {})
    for instruction in computation.values():
        match instruction.opcode:
            case "while":
                trips = find_trip_count(module, instruction, computation)
                if trips is None:
                    endless.append(instruction.name)
                    trips = 1
                for body in instruction.called_computations("body"):
                    executions += _list_executions(module, body, times * trips, asynchronous, endless)
            case "conditional":
                for branch in choose_branch(module, instruction):
                    executions += _list_executions(module, branch, times, asynchronous, endless)
            case "call" | "async-start" | "call-start" as opcode:
                started = asynchronous or opcode != "call"
                for body in list_called(instruction):
                    executions += _list_executions(module, body, times, started, endless)
            case opcode if not opcode.endswith(("-done", "-update")):
                executions.append(Execution(instruction, computation, times, asynchronous))
    return executions


def list_called(call: Instruction) -> tuple[str, ...]:
    """Return the computation of a call or an asynchronous one."""
    return call.called_computations("to_apply") or call.called_computations("calls")


def choose_branch(module: HloModule, conditional: Instruction) -> list[str]:
    """Return the branch of a conditional that moves most bytes, or none."""
    names = conditional.called_computations("branch_computations") or (
        *conditional.called_computations("true_computation"),
        *conditional.called_computations("false_computation"),
    )
    moved = {name: count_bytes_moved(module, _list_executions(module, name, 1, False, [])) for name in names}
    if not moved:
        return []
    return [max(moved, key=lambda name: moved[name])]


def find_trip_count(module: HloModule, loop: Instruction, computation: Computation) -> int | None:
    """Return the number of iterations of a while loop: from XLA's annotation, or for a loop that counts from one
    constant to another by a third, which the TPU's compiler does not annotate. None for any other loop."""
    if known := _TRIP_COUNT.search(loop.attributes):
        return int(known[1])
    try:
        (condition,), (body,) = (loop.called_computations(name) for name in ("condition", "body"))
        test = module.computations[condition][module.roots[condition]]
        if test.opcode != "compare" or not re.search(r"\bdirection=LT\b", test.attributes):
            return None
        index = get_tuple_index(module.computations[condition][test.operands[0]])
        following = module.computations[body]
        increment = _skip_copies(following, following[module.roots[body]].operands[index])
        if increment.opcode != "add" or get_tuple_index(_skip_copies(following, increment.operands[0])) != index:
            return None
        start = _get_constant(computation, computation[loop.operands[0]].operands[index])
        stop = _get_constant(module.computations[condition], test.operands[1])
        return max(0, -((start - stop) // _get_constant(following, increment.operands[1])))
    except (KeyError, IndexError, ValueError, ZeroDivisionError):
        return None


def _skip_copies(computation: Computation, name: str) -> Instruction:
    instruction = computation[name]
    if instruction.opcode == "copy":
        return _skip_copies(computation, instruction.operands[0])
    return instruction


def get_tuple_index(instruction: Instruction) -> int:
    if instruction.opcode != "get-tuple-element":
        raise ValueError(f"{instruction.name} is not a get-tuple-element")
    return int(re.findall(r"\bindex=(\d+)", instruction.attributes)[0])


def _get_constant(computation: Computation, name: str) -> int:
    instruction = _skip_copies(computation, name)
    if instruction.opcode != "constant":
        raise ValueError(f"{name} is not a constant")
    return int(instruction.operands[0])


def count_bytes_moved(module: HloModule, executions: list[Execution]) -> int:
    """Count the bytes of main memory that instructions read and write: an upper bound that assumes no cache hits.

    A slice or an in-place update counts its own bytes, not the bytes of the array that it slices or updates, also
    inside a fusion. Otherwise a loop over stacked layers would count all layers at each iteration.
    """
    return sum(e.times * count_instruction_bytes(module, e.instruction, e.computation) for e in executions)
