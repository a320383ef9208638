"""Whether the stages of a pipeline may each take its own branches, or have to take all of them in lockstep.

XLA's partitioner decides what an operation on a split dim becomes: a slice, a concatenation or a gather may turn into
a permute, at which it wants every device of the program. Only the compiled program tells. So it is compiled with
branches that are each stage's own, and if any of these holds a collective that other stages would have to come to, once
more with stages in lockstep.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from cjax.audit.stages import Wait, waits
from cjax.mesh import PIPE, compile_lowered
from cjax.program.composed import Composed
from cjax.program.steps import gradient_inputs, make_value_and_grad

Lower = Callable[[bool], jax.stages.Lowered]
MOST_NAMED = 3


class Lockstep:
    """What is known of the stages of one program.

    Args:
      composed: the program's.
      known: what another program with these layers has found out.

    Attributes:
      needed: whether stages take all branches in lockstep.
    """

    def __init__(self, composed: Composed, known: "Lockstep | None" = None) -> None:
        self._composed = composed
        self.needed = known.needed if known else composed.line is not None and composed.line.lockstep
        self._found: Sequence[Wait] = ()
        shape = composed.mesh.shape
        # A stage of one device has no collectives.
        self.asks = composed.line is not None and composed.mesh.size > shape[PIPE]

    def compile(self, lower: Lower) -> jax.stages.Compiled:
        """The program that `lower` gives, for stages in lockstep or not, as it can run.

        Raises:
          ValueError: it can't, since the author's own branches hold collectives that all stages would have to come to.
        """
        if self.asks and not self.needed:
            compiled = self._compile(lower(False))
            self._found = waits(compiled, self._composed.mesh, PIPE)
            self.needed = bool(self._found)
            if not self.needed:
                return compiled
        compiled = self._compile(lower(self.needed))
        if self.asks and (left := waits(compiled, self._composed.mesh, PIPE)):
            raise self._never(left)
        return compiled

    def _compile(self, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        return compile_lowered(lowered, list(self._composed.mesh.devices.flat), named=self.asks)

    def gradients(self) -> Callable[..., Any]:
        """`(*gradient_inputs(state), batch) -> (loss, aux, stored gradients, stored model_state)`, as it can run."""
        composed = self._composed
        if not self.asks:
            return make_value_and_grad(composed, self.needed)
        inputs = (*gradient_inputs(composed.state_shape), composed.with_batch(composed.batch_shape))
        return self.compile(lambda lockstep: make_value_and_grad(composed, lockstep).lower(*inputs))

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know."""
        line, plan = self._composed.line, self._composed.plan
        if line is None or not self.needed:
            return ()
        slower = line.schedule.split
        costs = ": zero_bubble is no faster than 1f1b here" if slower else ""
        what = "stages take all branches of a tick in lockstep, since"
        if self._found:
            return (f"{what} XLA has put {_named(self._found)}{costs}",)
        why = "positions are moved by permutes" if plan.sequence.size > 1 else "a grid is moved by permutes"
        return (f"{what} {why}{costs}",) if slower else ()

    def _never(self, left: Sequence[Wait]) -> ValueError:
        plan = self._composed.plan
        choices = ", ".join(dict.fromkeys(wait.choice for wait in left))
        return ValueError(
            f"pipeline={plan.pipeline}: in a tick each stage has another micro-batch, so that one takes a branch of "
            f"this model ({choices}) which another does not, and XLA has put {_named(left)}, to which all stages would "
            "have to come: they would wait for ever. Compute both sides and choose with jnp.where in the place of "
            f"lax.cond or lax.while_loop, or leave pipeline, or what splits its stages, out of the plan {str(plan)!r}."
        )


def _named(found: Sequence[Wait]) -> str:
    """`a collective-permute into Block/concatenate and 2 more`."""
    places = list(dict.fromkeys(f"{wait.kind} for {wait.where}" for wait in found))
    more = f" and {len(places) - MOST_NAMED} more" if len(places) > MOST_NAMED else ""
    return ", ".join(places[:MOST_NAMED]) + more + " into them"
