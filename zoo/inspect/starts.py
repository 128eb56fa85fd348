"""Find the start of the collective that a done waits for, which may be in another iteration of a loop."""

from collections.abc import Iterator

from .executions import get_tuple_index
from .hlo import Computation, HloModule, Instruction

_SAME_VALUE = ("copy", "bitcast", "opt-barrier", "optimization-barrier")


def find_starts(module: HloModule, done: Instruction, computation: Computation) -> frozenset[int]:
    """Return the identities (`id`) of the starts whose result a done may have as its operand.

    Inside a loop the operand may be an element of the loop's tuple: in the first iteration the start is before the
    loop, later it is in the iteration before.
    """
    found: set[int] = set()
    seen: set[tuple] = set()

    def follow(name: str, inside: Computation, path: tuple[int, ...]) -> None:
        """Follow the element at `path` of a value, which may be a tuple of tuples."""
        instruction = inside.get(name)
        if instruction is None or (id(instruction), path) in seen:
            return
        seen.add((id(instruction), path))
        for source, outside, inner in _list_sources(module, instruction, inside, path):
            follow(source, outside, inner)
        if instruction.opcode.endswith("-start"):
            found.add(id(instruction))

    for name in done.operands[:1]:
        follow(name, computation, ())
    return frozenset(found)


def _list_sources(
    module: HloModule, instruction: Instruction, computation: Computation, path: tuple[int, ...]
) -> Iterator[tuple[str, Computation, tuple[int, ...]]]:
    """Yield where the element at `path` of an instruction's result comes from: name, computation and path."""
    operands = instruction.operands
    match instruction.opcode:
        case "get-tuple-element":
            yield operands[0], computation, (get_tuple_index(instruction), *path)
        case "tuple" if path:
            yield operands[path[0]], computation, path[1:]
        case "while":
            for body in instruction.called_computations("body"):
                yield module.roots[body], module.computations[body], path
        case "call":
            for called in instruction.called_computations("to_apply"):
                yield module.roots[called], module.computations[called], path
        case "parameter" if caller := module.callers.get(id(computation)):
            call, outside = caller
            yield call.operands[int(operands[0])], outside, path
            for body in call.called_computations("body"):
                yield module.roots[body], computation, path
        case opcode if opcode in _SAME_VALUE or opcode.endswith("-update"):
            yield operands[0], computation, path
