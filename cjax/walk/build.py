"""A walk over a traced model, from its plan; what no walk can do is refused."""

from collections.abc import Sequence

import optax
from jax.sharding import Mesh

from cjax.gradients import LaidOut, divide_by, total_of
from cjax.plan import Plan
from cjax.sharding.place.model import ModelStorage, store_model
from cjax.sharding.place.staged import stage_model
from cjax.trace.author.capture import Capture
from cjax.trace.reading import Trace
from cjax.trace.stages.alike import find_alike_stacks
from cjax.trace.stages.stacks import LayerStack, reads_states, torn_states
from cjax.tree import PyTree
from cjax.walk.model import WalkModel
from cjax.walk.optimizer import RowOptimizer
from cjax.walk.programs import Programs
from cjax.walk.walker import Walker


def find_layers(trace: Trace) -> tuple[LayerStack, ...]:
    """The stacks that a walk goes through.

    Raises:
      ValueError: there are none, or state that is made of examples decides about the loss.
    """
    stacks = find_alike_stacks(trace)
    if not stacks:
        raise ValueError(
            "budget= and offload= go through a model layer by layer, and no layers that repeat were found. Give the "
            "model two or more equal layers in a row, each with weights of its own (a list of blocks, or nn.scan), or "
            "leave both out and share the model out: zero=3, tensor=2."
        )
    # The backward pass computes each layer once more, behind the forward pass: it would read newer state.
    names = reads_states(trace, stacks) or torn_states(trace, stacks)
    if names:
        more = f" and {len(names) - 2} more" if len(names) > 2 else ""
        raise ValueError(
            f"budget= and offload= compute each layer twice, and this model's loss depends on {', '.join(names[:2])}"
            f"{more}, which it makes anew of each batch: the second time it would be another. Let the loss in training "
            "not read it, update it where it is read, in the layer, or leave budget= and offload= out."
        )
    return stacks


def store_layers(capture: Capture, trace: Trace, plan: Plan, mesh: Mesh, stacks: Sequence[LayerStack]) -> ModelStorage:
    """Where each array lives, each layer's weights in rows of their own."""
    return store_model(capture, trace, plan, mesh, {group: None for stack in stacks for group in stack.weights})


def build_walker(
    stacks: Sequence[LayerStack],
    loss: LaidOut,
    optimizer: optax.GradientTransformation | None,
    params_shape: PyTree,
    batch_shape: PyTree,
) -> Walker:
    """What walks over a model.

    Args:
      stacks: of its layers, for which `loss.storage` was made.
      loss: as the plan lays it out.
      optimizer: the user's.
      params_shape: the user's tree of parameters.
      batch_shape: of a whole batch.

    Raises:
      ValueError: an optimizer that looks at several layers in a way that no pass over them can.
    """
    plan, trace, storage, mesh = loss.plan, loss.trace, loss.storage, loss.mesh
    staged = stage_model(trace, stacks, storage, plan, mesh, reduces=True)
    model = WalkModel(staged, plan.microbatches, total_of(trace, plan.microbatches))
    programs = Programs(model, storage, mesh, divide_by(loss), batch_shape)
    rows = None
    if optimizer is not None:
        own = [model.places(k, "params") for k in range(len(stacks))]
        rows = RowOptimizer(optimizer, params_shape, storage.params, own, storage.state_specs.__getitem__, mesh)
    lengths = [stack.length for stack in stacks]
    return Walker(programs, lengths, storage, rows, mesh)
