"""Scopes of the instructions of a compiled program: which module made one, and in which pass.

JAX writes the scopes of an operation into the HLO, and XLA keeps them through its passes:

    metadata={op_name="jit(step)/transpose(jvp(Decoder))/stack/while/body/checkpoint/rematted_computation/Block/ffn_norm/mul"}

Those are modules (`Decoder`, `stack`, `Block`, `ffn_norm`), JAX's calls and loops, transformations around the modules
that were called under them, and the primitive. An instruction that XLA merged has the names of several.
"""

import re
from typing import NamedTuple

from .hlo import Computation, HloModule, Instruction

_OP_NAME = re.compile(r'\bop_name="([^"]*)"')
_CALL = re.compile(
    r"(jit|pjit)\(.*|while|body|cond|branch_\d+_fun|closed_call|core_call|eval_jaxpr|shard_map|checkpoint|remat\d*"
    r"|rematted_computation|custom_(jvp|vjp)_call\w*"
)
"""Words of a scope that are calls and loops of JAX, and not modules."""
_TRANSFORMED = re.compile(r"(?:jvp|transpose|vmap)\((.*)\)")
_MAX_FOLLOWED = 8


class Scope(NamedTuple):
    """Where an instruction comes from."""

    modules: str
    """Modules from the model down, and named scopes: `Decoder/stack/Block/mixer.Attention/query`. Empty outside of
    all."""
    phase: str
    """Pass of a gradient: "forward", "backward" or "recomputed"; empty outside of one, as in the optimizer."""


def read_scope(op_name: str) -> Scope:
    """Read the modules and the phase from the `op_name` of an instruction."""
    if "rematted_computation" in op_name:
        phase = "recomputed"
    elif "transpose(" in op_name:
        phase = "backward"
    elif "jvp(" in op_name:
        phase = "forward"
    else:
        phase = ""
    first, merged, _ = op_name.split(";")[0].partition("/(")  # of several names, what they share, or the first
    *words, primitive = _split_at_slashes(first)
    if merged:
        words.append(primitive)
    modules: list[str] = []
    for word in words:
        while transformed := _TRANSFORMED.fullmatch(word):
            word = transformed[1]
        if word and not _CALL.fullmatch(word):
            modules.append(word)
    return Scope("/".join(modules), phase)


def find_scope(module: HloModule, instruction: Instruction, computation: Computation) -> Scope:
    """Return the scope of an instruction.

    XLA's own instructions have none: a fusion takes the scope of its result, any other one the scope of its first
    operand, and of the loop around both if the operand has none either.
    """
    for _ in range(_MAX_FOLLOWED):
        if name := _find_op_name(module, instruction):
            return read_scope(name)
        following = next((computation[name] for name in instruction.operands if name in computation), None)
        if following is None:
            break
        instruction = following
    if caller := module.callers.get(id(computation)):
        return find_scope(module, *caller)
    return Scope("", "")


def find_written_scope(module: HloModule, instruction: Instruction, computation: Computation, index: str = "") -> Scope:
    """Return the scope of the array that an instruction writes, `index` of its results: `{1}`.

    A loop writes an array of each iteration into a stack, as a scan does with its residuals: the scope is where the
    array comes from, not the loop.
    """
    inner = instruction
    inside = computation
    for name in instruction.called_computations("calls"):
        inside = module.computations[name]
        inner = inside[module.roots[name]]
    if inner.opcode == "tuple" and (number := re.search(r"\d+", index)):
        inner = inside[inner.operands[int(number[0])]]
    result = _skip_reshapes(inner, inside)
    if result.opcode != "dynamic-update-slice":
        if index:
            return find_scope(module, inner, inside)
        return find_scope(module, instruction, computation)
    update = _skip_reshapes(inside[result.operands[1]], inside)
    if update.opcode == "parameter" and inside is not computation:
        update = _skip_reshapes(computation[instruction.operands[int(update.operands[0])]], computation)
        inside = computation
    scope = find_scope(module, update, inside)
    if scope.modules:
        return scope
    return find_scope(module, instruction, computation)


def _skip_reshapes(instruction: Instruction, computation: Computation) -> Instruction:
    while instruction.opcode in ("bitcast", "reshape", "convert", "copy") and instruction.operands[0] in computation:
        instruction = computation[instruction.operands[0]]
    return instruction


def _find_op_name(module: HloModule, instruction: Instruction) -> str:
    if found := _OP_NAME.search(instruction.attributes):
        return found[1]
    for name in instruction.called_computations("calls"):
        if name in module.computations:
            root = module.computations[name][module.roots[name]]
            return _find_op_name(module, root)
    return ""


def _split_at_slashes(op_name: str) -> list[str]:
    """Split at the slashes that are not inside parentheses: a word may be `transpose(jvp(a/b))`."""
    words = [""]
    depth = 0
    for character in op_name:
        depth += (character == "(") - (character == ")")
        if character == "/" and depth == 0:
            words.append("")
        else:
            words[-1] += character
    return words
