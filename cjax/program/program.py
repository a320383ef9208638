"""`Program`: what a user holds. One model, one loss, one plan; every method works on logical arrays."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from cjax import checkpoint
from cjax.audit import audit
from cjax.machines import Cluster
from cjax.mesh import Device, not_nan, own_context, resolve_devices
from cjax.pipeline.table import Schedule
from cjax.plan import Plan
from cjax.program.batches import place_batch, table_limits
from cjax.program.check import Check
from cjax.program.compose import compose
from cjax.program.composed import Composed, Given
from cjax.program.description import describe_step, describe_trace
from cjax.program.evaluation import Evaluator
from cjax.program.exchange import adopted, differentiable
from cjax.program.explained import explained
from cjax.program.keep import check_fits, store_leaves
from cjax.program.lockstep import Lockstep
from cjax.program.memory import OutOfMemory, alternatives
from cjax.program.saving import arrays_of, of_model, ready_model, restored, shapes_of, state_from, to_save, trees_of
from cjax.program.scores import is_one
from cjax.program.starting import Starter, make_key, must_run
from cjax.program.state import State, check_alive, not_pickled
from cjax.program.steps import gradient_inputs, make_step, make_update
from cjax.program.texts import Step, Texts
from cjax.program.verify import check_plan, told, verify
from cjax.program.walk_report import describe_walked
from cjax.program.walked import WalkedState
from cjax.program.walking import NO_STEP, NOTHING_KEPT, walking_of
from cjax.report import Candidate, Comparison, Explained, Report, TraceSummary
from cjax.trace.dims.tables import Limits
from cjax.tree import PyTree, kind_of

MOST_SETTLED = 4  # plans of "auto" that are compiled before a program is made


class Program:
    """A model, its loss and its optimizer under one plan; made by `cjax.parallelize`.

    Attributes:
      plan: the plan, every number filled in.
      mesh: the JAX mesh it runs on.
      loss_scale: how the loss of `precision=float16` is scaled; None under any other.
      verified: under `verify=True`, from the first step on: the check that the plan passed, or why there was none.

    >>> import cjax, flax.linen as nn, optax
    >>> batch, loss = jnp.ones((8, 3)), lambda model, x: ((model(x) - 1) ** 2).mean()
    >>> program = cjax.parallelize(nn.Dense(1), loss, optax.sgd(0.1), batch, "data=1", devices=jax.devices()[:1])
    >>> state, metrics = program.step(program.init(0), batch)
    >>> state, bool(program.evaluate(state, batch)["loss"] < metrics["loss"])
    (State(step=1, 0.0 MiB), True)
    """

    def __init__(self, composed: Composed) -> None:
        self._composed = composed
        self._lockstep = Lockstep(composed)
        self._walking = walking_of(composed) if composed.walker else None
        self._start = self._walking.start if self._walking else Starter(composed)
        self._evaluate = Evaluator(composed, self._lockstep)
        self._texts: dict[Step, Texts] = {}
        self.plan, self.mesh, self.loss_scale = composed.plan, composed.mesh, composed.scaling
        self.verified: Check | str | None = None

    __reduce__ = not_pickled

    def __repr__(self) -> str:
        return f"Program({str(self.plan)!r}, {self.mesh.size} x {self.mesh.devices.flat[0].device_kind})"

    @property
    def trace(self) -> TraceSummary:
        """What was found in the model: dims, blocks, unknown primitives. Print it."""
        return describe_trace(self._composed.trace, self._composed.capture.name)

    @property
    def data_shard(self) -> tuple[int, int]:
        """(index, count): which part of each batch this process loads."""
        return jax.process_index(), jax.process_count()

    # -- state --------------------------------------------------------------------------------------------------
    @own_context
    def init(self, seed_or_key: int | jax.Array = 0, params: Any = None) -> State:
        """A fresh state, each array born where it lives.

        Args:
          seed_or_key: an integer, or a JAX key.
          params: values to start from, whole or in part: a tree of arrays in the user's structure, `{path: array}`,
            `{path: callable of an index}`, or the path of a safetensors file or folder. A folder of transformers
            fits the models of `cjax.models`. Of a file, each device reads its own shard alone.

        Raises:
          FileNotFoundError, ValueError: no such file or folder; unknown names or wrong shapes in `params`, all at once.
        """
        must_run(self.mesh, "init")
        return self._start(make_key(seed_or_key), params)

    @own_context
    def params(self, state: State) -> PyTree:
        """The trained parameters, in the user's own tree."""
        return trees_of(of_model(self._composed, state), "params")["params"]

    @own_context
    def model(self, state: State) -> Any:
        """The user's own model, trained."""
        return ready_model(self._composed, of_model(self._composed, state))

    @own_context
    def adopt(self, state: State, source: State | PyTree) -> State:
        """`state` with parameters from elsewhere; the rest stays. Both share arrays, so that a step gives up both.

        Args:
          source: a state of another program of this model, such as one with another `wrt`: what that one trains, and
            its running state, take the place of this one's. Or parameters by name, trained here or frozen: a tree in
            the user's structure, or `{path: array}`.

        Raises:
          ValueError: parameters that this model has not, or of other shapes.
        """
        return adopted(self._composed, self._own(state), source)

    # -- training -----------------------------------------------------------------------------------------------
    @not_nan
    @own_context
    def step(self, state: State, batch: PyTree) -> tuple[State, dict[str, Any]]:
        """One step of training. Gives up `state`; a step that is not finite leaves everything but its number as it was.

        Args:
          state: from `init`, `restore` or the step before.
          batch: arrays of the shapes and dtypes that `parallelize` saw.

        Returns:
          The next state, and metrics as scalar arrays: `loss`, `grad_norm`, `skipped` (1 if the step was not finite),
          the loss's own `aux`, under float16 `loss_scale` (of this step), and `noise_scale` where it is measured.

        Raises:
          OutOfMemory: before the first step, when the plan does not fit its devices.
          MismatchError: before the first step, under `verify=True`, when the plan computes something else.
          ValueError: a batch of another shape or dtype, or with tokens outside the vocabulary.
        """
        self._must_train("step")
        placed = place_batch(self._composed, batch, self._limits)
        state, run = self._own(state), self._step
        self._verify(state, batch)
        return run(state, placed)  # compiles at first, when all that was given is known to be good

    @own_context
    def compile(self) -> None:
        """Compiles the step now, and not at the first batch; raises what that would raise of memory."""
        self._must_train("compile")
        _ = self._step

    @functools.cached_property
    def _step(self) -> Any:
        run = self._compiled if self._walking is None else self._walking.step
        if not (report := self.report()).memory.fits:
            raise OutOfMemory(report, alternatives(self._composed.planning, self.plan, report, self._try))
        return run

    @functools.cached_property
    def _compiled(self) -> Any:
        if self._composed.optimizer is None:
            return self._evaluate.compiled()
        return self._lockstep.compile(self._lower_step)

    def _lower_step(self, lockstep: bool) -> jax.stages.Lowered:
        return make_step(self._composed, lockstep).lower(*self._inputs)

    @property
    def _inputs(self) -> tuple[Any, Any]:
        return self._composed.state_shape, self._composed.with_batch(self._composed.batch_shape)

    @own_context
    def lower(self) -> jax.stages.Lowered:
        """The step, lowered for the plan's mesh: for anyone's tools. Without an optimizer, the evaluation.

        Raises:
          ValueError: a plan whose step walks over layers (`budget=`, `offload=`), and so is many programs.
        """
        if self._walking is not None:
            raise ValueError(NO_STEP.format(str(self.plan)))
        if self._composed.optimizer is None:
            return self._evaluate.lower()
        if self._lockstep.asks and not self._lockstep.needed:
            _ = self._compiled  # tells which of two programs it is
        return self._lower_step(self._lockstep.needed)

    @functools.cached_property
    def _limits(self) -> dict[int, tuple[Limits, ...]]:
        return table_limits(self._composed.trace)

    @not_nan
    @own_context
    def value_and_grad(self, state: State, batch: PyTree, params: PyTree = None) -> tuple[jax.Array, PyTree]:
        """The loss and its gradients, in the user's own tree; `state` stays valid.

        Args:
          state: what the loss reads: parameters, running statistics, random numbers.
          params: the user's tree of parameters in place of the state's: gradients at another point.
        """
        placed = place_batch(self._composed, batch, self._limits)
        state = self._own(state)
        self._verify(state, batch)
        if self._walking is not None:
            walked = self._with_params(state, params)
            assert isinstance(walked, WalkedState)
            loss, _, grads, _ = self._walking.value_and_grad(walked, placed)
            return loss, grads
        stored = gradient_inputs(self._with_params(state, params))
        loss, _, grads, _ = self._value_and_grad(*stored, placed)
        return loss, self._composed.storage.params.load(grads)

    def _with_params(self, state: State, params: PyTree | None) -> State:
        if params is None:
            return state
        if self._walking is not None:
            assert isinstance(state, WalkedState)
            tree = check_fits(self._composed.storage.params, params, "these params are")
            return self._walking.with_params(state, tree)
        return dataclasses.replace(state, _params=self._stored_params(params, "these params are"))

    @functools.cached_property
    def _value_and_grad(self) -> Any:
        return self._lockstep.gradients()

    def loss(self, state: State, batch: PyTree, params: PyTree = None) -> jax.Array:
        """The loss of training, as a number that `jax.grad` and `jax.vjp` differentiate in `params`.

        It takes what `value_and_grad` takes, costs as much, and stands outside of `jax.jit`, as it is compiled itself.
        """
        params = self.params(state) if params is None else params
        return differentiable(lambda params: self.value_and_grad(state, batch, params))(params)

    @own_context
    def update(self, state: State, grads: PyTree, loss: Any = None) -> State:
        """The state after the optimizer has taken `grads`, in the user's own tree. Gives up `state`.

        Args:
          grads: a tree like the parameters.
          loss: for optimizers that follow it, such as `optax.contrib.reduce_on_plateau`; no others need it.

        Raises:
          ValueError: another tree than the parameters'; no loss where the optimizer follows it; no optimizer at all.
        """
        self._must_train("update")
        state = self._own(state)
        assert self._composed.optimizer is not None
        if loss is None and self._composed.optimizer.reads_loss:
            raise ValueError(
                "this optimizer follows the loss (optax calls it `value`): give it, program.update(state, grads, loss)"
            )
        loss = jnp.float32(0 if loss is None else loss)
        if self._walking is not None:
            assert isinstance(state, WalkedState)
            tree = check_fits(self._composed.storage.params, grads, "these gradients are")
            return self._walking.update(state, tree, loss)
        grads = self._stored_params(grads, "these gradients are")
        return self._update(state, grads, loss)[0]

    def _stored_params(self, tree: PyTree, what: str) -> Any:
        storage = self._composed.storage.params
        return store_leaves(storage, check_fits(storage, tree, what), self.mesh)

    @functools.cached_property
    def _update(self) -> Any:
        return make_update(self._composed)

    @not_nan
    @own_context
    def evaluate(
        self, state: State, batch: PyTree | Iterable[PyTree], fn: Callable[..., Any] | None = None, params: Any = None
    ) -> Any:
        """The loss in evaluation mode, `{"loss": ...}` with `aux` if there is any, or what `fn` gives, of all batches.

        Args:
          batch: a batch, or an iterable of batches of any sizes. Of them all, means, and sums over weights of the
            batch (masked means), are exact; what else `aux` has is averaged by rows.
          fn: `fn(model, batch)`, whose scalars are averaged by rows, `Mean`s by weight, and arrays joined.
          params: the user's tree of parameters to score in place of the state's (averaged ones, say).

        Raises:
          TypeError, ValueError: `fn` is no function; a batch that does not fit the model, or none at all.
        """
        if fn is not None and not callable(fn):
            raise TypeError(f"`fn` is {kind_of(fn)}; give a function `fn(model, batch)`, or leave it out.")
        state = self._with_params(self._own(state), params)
        return self._evaluate(state, [batch] if is_one(batch, self._composed.batch_shape) else batch, fn)

    # -- keeping ------------------------------------------------------------------------------------------------
    @own_context
    def save(self, path: str | Path, state: State) -> None:
        """Write a checkpoint of logical arrays, from which any plan can go on.

        Raises:
          TypeError, ValueError, OSError: no path, or one that holds something else; another model's state; a full disk.
        """
        of_model(self._composed, state)
        if not isinstance(path, str | Path) or not str(path):
            raise TypeError(f'save takes the path of a folder, not {path!r}: program.save("runs/mine", state)')
        tree, rows = self.to_rows(state)
        checkpoint.save(path, tree, self.meta(state), rows)

    @own_context
    def meta(self, state: State) -> dict[str, Any]:
        """What a checkpoint says of itself beside its arrays."""
        return {"plan": str(self.plan), "num_devices": self.mesh.size, "step": int(state.step)}

    @own_context
    def restore(self, source: str | Path | State) -> State:
        """The state of a checkpoint, or of a live state of any plan of this model, laid out by this plan.

        Raises:
          TypeError, ValueError: neither path nor state; another model's, with every leaf that is missing or differs.
        """
        must_run(self.mesh, "restore")
        if not isinstance(source, State | str | Path):
            raise TypeError(f"restore takes the path of a checkpoint or a state, not {kind_of(source)}.")
        return restored(self._composed, source)

    @own_context
    def resume(self) -> State | None:
        """The state after the last step of a run that has ended, however it did, from its `disk_folder`; None if there
        is none. For plans that keep all of layers on disk (`host=0B disk=...`); others go on from checkpoints.

        Raises:
          ValueError: the plan keeps some of it elsewhere.
        """
        must_run(self.mesh, "resume")
        if self._walking is None:
            raise ValueError(NOTHING_KEPT.format(str(self.plan)))
        return self._walking.resume()

    @own_context
    def abstract_state(self) -> PyTree:
        """The logical arrays of a state as placed ShapeDtypeStructs: what `cjax.checkpoint.restore` takes."""
        return shapes_of(self._composed)

    @own_context
    def from_arrays(self, arrays: PyTree) -> State:
        """A state from logical arrays in the structure of `abstract_state`: a dict of `params`, `frozen`, `opt_state`,
        `carried`, `step`, `key`, `loss_scale` and `noise_scale`, the trees the user's own, from `to_arrays` say.

        Raises:
          ValueError: arrays of another model; every missing, unexpected or differently shaped leaf is listed.
        """
        return state_from(self._composed, arrays)

    @own_context
    def to_arrays(self, state: State) -> PyTree:
        """The logical arrays of a state, which outlive it: what `from_arrays` and `cjax.checkpoint.save` take."""
        return arrays_of(state)

    @own_context
    def to_rows(self, state: State) -> tuple[PyTree, checkpoint.Rows | None]:
        """The same as `tree` and `rows` of `cjax.checkpoint.save`: of a walk, layer after layer."""
        return to_save(state)

    def _own(self, state: State) -> State:
        check_alive(state)
        if state._shelves is not self._composed.shelves:
            raise ValueError("this state belongs to another program; take it over with state = program.restore(state)")
        return state

    # -- plans --------------------------------------------------------------------------------------------------
    @own_context
    def replan(self, plan: Plan | str, devices: Sequence[Device] | Cluster | str | None = None) -> "Program":
        """The same model and loss under another plan, or on other devices."""
        found = list(self.mesh.devices.flat) if devices is None else resolve_devices(devices)
        return composed_program(self._composed.given, plan, found)

    @own_context
    def compare(self, plans: Iterable[Plan | str]) -> Comparison:
        """Several plans side by side, each compiled; one that is refused or doesn't compile is a row that says why.

        Raises:
          TypeError: one plan, and not several.
        """
        if isinstance(plans, str | Plan) or not isinstance(plans, Iterable):
            first = str(plans) if isinstance(plans, str | Plan) else "data=8"
            raise TypeError(f"compare takes several plans: compare([{first!r}, ...])")
        rows = [(str(plan), self._try(str(plan))) for plan in plans]
        return Comparison([Candidate(p, o) if isinstance(o, Report) else Candidate(p, reason=o) for p, o in rows])

    def _try(self, plan: str) -> Report | str:
        try:
            return self.replan(plan).report()
        except Exception as error:
            # Whatever it is, XLA's own errors included: a plan that can't be had is a row, and the others are too.
            text = str(error).strip() or type(error).__name__
            return text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"

    @own_context
    def report(self) -> Report:
        """What the step needs, splits, moves and takes; compiles once, for `step` as well."""
        if self.verified is None:
            return self._report
        return dataclasses.replace(self._report, watch=[*self._report.watch, told(self.verified)])

    @functools.cached_property
    def _report(self) -> Report:
        if self._walking is not None:
            hardware = self._composed.planning.known(self.mesh.size)
            walking = self._walking
            return describe_walked(self._composed, walking.measured, walking.homes, hardware, walking.record)
        facts, hardware = audit(self._compiled, self.mesh), self._composed.planning.known(self.mesh.size)
        notes = self._evaluate.notes if self._composed.optimizer is None else self._lockstep.notes
        return describe_step(self._composed, facts, hardware, notes)

    @own_context
    def explain(self) -> Explained:
        """Why this plan: for each word, what its nearest other values would cost, by arithmetic; nothing is compiled.

        Raises:
          ValueError: a plan of which arithmetic can say nothing.
        """
        planning = self._composed.planning
        found = planning.explain(self.plan)
        if isinstance(found, str):
            raise ValueError(f"plan {str(self.plan)!r} can't be explained: {found}")
        return explained(found, planning, self._composed.decision)

    @own_context
    def learn(self, step_seconds: Sequence[float]) -> None:
        """Takes seconds of steps, without those compiled first, to measure all predictions by; `fit` does it.

        Raises:
          ValueError: seconds that no step can have taken.
        """
        self._composed.planning.learn(self.plan, step_seconds)
        vars(self).pop("_report", None)

    @own_context
    def check(self, state: State, batch: PyTree) -> Check:
        """This plan against the author's own loss on one device: loss, aux, every gradient, and what is farthest off.

        Compared is with the undivided batch, but for losses that differ between micro-batches by contract (dropout,
        BatchNorm). `.ok` says whether all agree to rounding, `.wrong` what does not.

        Raises:
          MemoryError: the model does not fit one device.
        """
        must_run(self.mesh, "check")
        place_batch(self._composed, batch, self._limits)
        return check_plan(self._composed, self._own(state), batch)

    def _verify(self, state: State, batch: PyTree) -> None:
        if self._composed.given.verifies and self.verified is None:
            self.verified = verify(self._composed, state, batch)

    def _must_train(self, what: str) -> None:
        must_run(self.mesh, what)
        if self._composed.optimizer is None:
            raise ValueError(
                f"{what} needs an optimizer, and this program was made with None, for evaluation; "
                "give parallelize one, such as optax.adamw(1e-3)."
            )


def texts_of(program: Program, state: State, step: Step) -> Texts | None:
    """Passes over new tokens from a state of a program that walks over its layers; None of any other."""
    if program._walking is None:
        return None
    program._own(state)
    return program._texts.get(step) or program._texts.setdefault(step, Texts(program._composed, step))


def composed_program(
    given: Given, plan: Plan | str, devices: Sequence[Device], schedule: Schedule | None = None
) -> Program:
    """The program of a plan; where "auto" chose one that, compiled, turns out not to fit, that of the next best."""
    program = Program(compose(given, plan, devices, schedule))
    decision = program._composed.decision
    if not decision.is_close:
        return program
    for _ in range(MOST_SETTLED):
        memory = program.report().memory
        leaner = [] if memory.fits else decision.leaner(memory.total)
        found = None
        for other in leaner[:MOST_SETTLED]:
            try:
                found = compose(given, other.noting(f"{program.plan} is compiled to {memory}"), devices, schedule)
            except ValueError:  # the model refuses it, which no search knows before
                continue
            break
        if found is None:
            return program
        program, decision = Program(found), found.decision
    return program
