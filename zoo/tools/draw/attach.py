"""Attach the traced moves of a step to the parts of a drawing: by name scopes, and moves of parameters by their
sizes."""

import dataclasses
from collections.abc import Sequence

from .parts import DrawnParameter, Group, Move, Section
from .traced_moves import TracedMove

_LONGEST_SUBJECT = 28
"""Maximum length of joined names in characters; beyond it, their number stands for them."""
_Key = tuple[str, tuple[str, ...], str, bool, bool]
"""Collective, axes, phase, whether single numbers move, and whether a part of the section has a name."""


def attach_moves(groups: Sequence[Group], moves: Sequence[TracedMove]) -> tuple[list[Group], list[Move]]:
    """Return the groups with their moves, and the moves that follow the backward pass.

    Group i of the layers has the label i. Nothing is lost: the counts and bytes of all moves equal the totals of the
    trace.
    """
    of_groups = [_Collector() for _ in groups]
    of_sections: list[dict[str, _Collector]] = [{s.name: _Collector() for s in group.sections} for group in groups]
    of_step = _Collector()
    kinds = [number for number, group in enumerate(groups) if group.layers]
    last = len(groups) - 1
    for move in _add_up(moves):
        word = move.modules[0] if move.modules else ""
        # Moves that no pass of differentiation has touched were taken out of the loop over a pipeline's ticks.
        in_stack = word == "stack" or (move.in_model and not move.differentiated)
        if not move.in_model:
            if not move.differentiated:
                subject = "loss" if move.size == 1 else "gradients"
                of_step.add(move, subject)
            else:
                of_sections[last].setdefault("loss", _Collector()).add(move)
        elif "gather" in move.modules and move.layer is None:
            _share_out(move, groups, [n for n, group in enumerate(groups) if bool(group.layers) == in_stack], of_groups)
        elif move.layer is not None:
            number = kinds[move.layer]
            if word in of_sections[number]:
                of_sections[number][word].add(move, ".".join(move.modules[1:]))
            elif word:
                of_sections[number].setdefault(word, _Collector()).add(move, ".".join(move.modules[1:]))
            else:
                of_groups[number].add(move, "hidden states")
        elif in_stack and kinds:
            of_groups[kinds[0]].add(move, "hidden states")
        else:
            if word == "_Unembedding":
                name = "head"
                inner = ""
            else:
                name = word or "loss"
                inner = ".".join(move.modules[1:])
            number = next((n for n, sections in enumerate(of_sections) if name in sections), last)
            if name not in of_sections[number] and "head" in of_sections[last]:  # a tied matrix
                name = "head"
                inner = ".".join(move.modules)
            of_sections[number].setdefault(name, _Collector()).add(move, inner)
    attached = []
    for group, collector, sections in zip(groups, of_groups, of_sections, strict=True):
        known = {section.name: section for section in group.sections}
        parts = [
            dataclasses.replace(known.get(name) or Section(name, ()), moves=sections[name].make_moves())
            for name in sorted(sections, key=lambda name: name == "loss")
        ]
        attached.append(dataclasses.replace(group, sections=tuple(parts), moves=collector.make_moves()))
    return attached, list(of_step.make_moves())


def _add_up(moves: Sequence[TracedMove]) -> list[TracedMove]:
    """Add up equal collectives of the program."""
    times: dict[TracedMove, int] = {}
    for move in moves:
        key = move._replace(times=1)
        times[key] = times.get(key, 0) + move.times
    return [move._replace(times=count) for move, count in times.items()]


def _share_out(
    move: TracedMove, groups: Sequence[Group], numbers: Sequence[int], collectors: Sequence["_Collector"]
) -> None:
    """Attach a move of parameters, whose call has no name, to the parameters of its size: of `numbers`, by their
    layers."""
    candidates = [
        (number, parameter, max(len(groups[number].layers), 1))
        for number in numbers
        for parameter in groups[number].parameters
    ]
    matching = [x for x in candidates if _matches(move, x[1])] or candidates[:1]
    total = sum(layers for _, _, layers in matching)
    left = move.times
    for index, (number, parameter, layers) in enumerate(matching):
        times = move.times * layers // total
        if index == len(matching) - 1:
            times = left  # with what rounding leaves
        left -= times
        if times:
            subject = parameter.name.removeprefix("layers.*.").removesuffix(".weight")
            collectors[number].add(move._replace(times=times), subject)


def _matches(move: TracedMove, parameter: DrawnParameter) -> bool:
    """Return True if the move has the axes and the size of this parameter, gathered, or of its gradient."""
    axes = {axis for axes in parameter.gathered_axes for axis in axes}
    if move.collective == "reduce-scatter":
        known = (set(parameter.gradient_axes),)
    else:
        known = (axes,)
    return set(move.axes) in known and move.size == parameter.size_in_use


class _Collector:
    """Moves at one place, added up by collective, axes and phase."""

    def __init__(self):
        self.found: dict[_Key, list[Move]] = {}

    def add(self, move: TracedMove, subject: str = "") -> None:
        if move.backward:
            phase = "backward"
        elif move.in_model or move.differentiated:
            phase = "forward"
        else:
            phase = "update"
        added = Move(move.collective, move.axes, subject, phase, move.times, move.times * move.bytes)
        self.found.setdefault((move.collective, move.axes, phase, move.size == 1, bool(subject)), []).append(added)

    def make_moves(self) -> tuple[Move, ...]:
        """Return one move per collective, axes and phase, in the order of the program, forward first."""
        moves = []
        for parts in self.found.values():
            subjects = [part.subject for part in parts]
            if parts[0].phase == "backward":
                subjects.reverse()
            count = sum(part.count for part in parts)
            size = sum(part.bytes for part in parts)
            moves.append(dataclasses.replace(parts[0], subject=_join_subjects(subjects), count=count, bytes=size))
        return tuple(sorted(moves, key=lambda move: ("forward", "backward", "update").index(move.phase)))


def _join_subjects(subjects: Sequence[str]) -> str:
    """Join names of matrices, in the order of the layer; if there are many, return their number."""
    names = [name for name in dict.fromkeys(subjects) if name]
    joined = ", ".join(names)
    if len(joined) > _LONGEST_SUBJECT:
        return f"{len(names)} parameters"
    return joined
