"""Where the stages of a pipeline would wait for each other for ever: at collectives in branches that only some take.

Stages go through one program, and look up in each tick which of its branches they take. A collective in such a branch
has to be among devices of one stage; a permute can't even then be, since XLA may expect every device of a program at
it. Which of them the compiler put there, only the compiled program tells.
"""

import re
from dataclasses import dataclass

import jax
from jax.sharding import Mesh

from cjax.audit import hlo
from cjax.audit.facts import author_module
from cjax.audit.read import RECEIVED, axes_of

TICKS = "pipeline_ticks"  # the scope of the loop that stages go through
LOCKSTEP = re.compile(r"\ball_runs_[\d_]+_of_\d+/\w+$")  # a branch that all stages take whenever one does


@dataclass(frozen=True)
class Wait:
    """A collective that not all stages come to.

    Args:
      kind: all-gather, collective-permute and the like.
      where: the author's module and the operation for which it is there.
      choice: the branch it is in, likewise.
    """

    kind: str
    where: str
    choice: str


def waits(compiled: jax.stages.Compiled, mesh: Mesh, axis: str) -> tuple[Wait, ...]:
    """The collectives of a compiled program at which the stages along `axis` would wait for each other for ever."""
    text = compiled.as_text()
    assert text, "only XLA's programs are asked, and they have a text"
    walk = _Walk(hlo.parse(text), mesh, axis)
    walk.through(walk.module.entry, False, "")
    return tuple(walk.found)


class _Walk:
    """Goes through all that a program calls."""

    def __init__(self, module: hlo.Module, mesh: Mesh, axis: str) -> None:
        self.module, self.axis = module, axis
        self.mesh_shape = tuple(mesh.shape.items())
        self.found: dict[Wait, None] = {}
        self._seen: set[tuple[str, bool, bool]] = set()

    def through(self, computation: str, ticking: bool, choice: str) -> None:
        """Args: a computation; whether stages go through ticks around it; the branch around it that only some take."""
        key = computation, ticking, bool(choice)
        if key in self._seen:
            return
        self._seen.add(key)
        for instruction in self.module.computations[computation]:
            name = instruction.op_name
            kind = instruction.opcode.removesuffix("-start")
            if choice and kind in RECEIVED and self._spans(instruction, kind):
                self.found[Wait(kind, _place(name), _place(choice))] = None
            if not instruction.called:
                continue
            inside = ticking or f"/{TICKS}/" in name
            mine = choice
            if inside and not choice and self._is_a_choice(instruction, name):
                mine = name or instruction.name
            for each in instruction.called:
                self.through(each, inside, mine)

    def _is_a_choice(self, instruction: hlo.Instruction, name: str) -> bool:
        """Whether one stage may do this and another not, or not as often."""
        if instruction.opcode == "while":
            return hlo.trip_count(instruction, self.module) is None
        return instruction.opcode == "conditional" and not LOCKSTEP.search(name)

    def _spans(self, instruction: hlo.Instruction, kind: str) -> bool:
        groups = tuple(group for group in hlo.replica_groups(instruction, self.module.num_devices) if len(group) > 1)
        if not groups:
            return False
        return kind == "collective-permute" or self.axis in axes_of(groups, self.mesh_shape)[0]


def _place(op_name: str) -> str:
    operation = op_name.rpartition("/")[2]
    module = author_module(op_name)
    return f"{module}/{operation}" if module else operation
