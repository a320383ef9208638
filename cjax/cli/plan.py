"""`cjax plan`."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import optax
import tyro

from cjax.cli.devices import training_devices
from cjax.cli.options import check_options
from cjax.cli.users import user_parts, with_lines
from cjax.cluster import Cluster
from cjax.mesh import num_cpus_named
from cjax.models import GPT, gpt, loss
from cjax.parallelize import parallelize


@dataclasses.dataclass(frozen=True)
class PlanCommand:
    """Compares plans for a model on machines that may not be here, by compiling; nothing is trained.

    Attributes:
        model: a built-in one by name, such as gpt2-xl, or `file.py:function` with a function of yours that returns
            what `cjax.parallelize` takes: (model, loss, optimizer, batch).
        target: cards to compile for, such as h100:64 or a100:8; machines of your own, such as
            h100:64/node=8,nvlink=450GB/s,network=8x50GB/s,price=2.5; or virtual devices, cpu:8.
        plan: a plan, such as "tensor=8 zero=1"; give it several times to compare.
        batch: rows of the global batch, for a built-in model; 1 for each device if not given.
        seq: tokens per row, for a built-in model; its context if not given.
    """

    model: tyro.conf.Positional[str]
    target: str = "h100:8"
    plan: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    batch: int | None = None
    seq: int | None = None

    @staticmethod
    def parse(arguments: Sequence[str]) -> "PlanCommand":
        return tyro.cli(PlanCommand, args=arguments, prog="cjax plan")

    def run(self) -> int:
        check_options(self, {"batch": 1, "seq": 1})
        num_devices, devices = self._target()
        if ".py:" not in self.model:
            return self._compare(self._built_in(num_devices), devices)
        if self.batch is not None or self.seq is not None:
            raise ValueError("--batch and --seq are for built-in models; yours brings its own batch")
        parts = user_parts(self.model)
        return with_lines(Path(self.model.rpartition(":")[0]), lambda: self._compare(parts, devices))

    def _target(self) -> tuple[int, Any]:
        """How many devices to plan for, and which."""
        if (num_cpus := num_cpus_named(self.target)) is not None:
            if num_cpus < 1:
                raise ValueError(f"--target {self.target} is no device at all; write cpu:8")
            return num_cpus, training_devices(f"cpu:{num_cpus}")
        cluster = Cluster.parse(self.target)
        if cluster.num_devices is None:
            raise ValueError(f"--target {cluster} says no number of cards; write {cluster.with_devices(8)}")
        # Compiling needs XLA's GPU compiler and no GPU; JAX should not look for one.
        jax.config.update("jax_platforms", "cpu")
        return cluster.num_devices, cluster

    def _compare(self, parts: tuple[Any, Any, Any, Any], devices: Any) -> int:
        plans = self.plan or ("auto",)
        if len(plans) == 1:
            print(parallelize(*parts, plan=plans[0], devices=devices).report())
            return 0
        # Any plan will do to trace the model; `auto` would search for one that nobody asked for.
        comparison = parallelize(*parts, plan="data=-1", devices=devices).compare(list(plans))
        print(f"{self.model} on {self.target}\n\n{comparison}")
        return 0 if comparison.reports else 1

    def _built_in(self, num_devices: int) -> tuple[Any, Any, Any, Any]:
        config = gpt(self.model)
        shape = (self.batch or num_devices, self.seq or config.context)
        tokens = jax.ShapeDtypeStruct(shape, "int32")
        return lambda rngs: GPT(config, rngs=rngs), loss, optax.adamw(1e-3), {"inputs": tokens, "targets": tokens}
