"""`cjax plan`."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import tyro

from cjax.cli.built_in import built_in
from cjax.cli.devices import training_devices
from cjax.cli.options import check_options, flag
from cjax.machines import Cluster
from cjax.mesh import num_cpus_named
from cjax.parallelize import parallelize
from cjax.plan import is_auto
from cjax.planner.choice.scored import check_objective
from cjax.program import Program
from cjax.program.plans import plans
from cjax.program.walks import walk_plans
from cjax.users import user_parts, with_lines

ROWS = 256  # of the batch, where neither it nor the number of devices is said


@dataclasses.dataclass(frozen=True)
class PlanCommand:
    """Compares plans for a model on machines that may not be here, by compiling, or searches for the best.

    Attributes:
        model: a built-in one by name, such as gpt2-xl, llama-3-8b, bert-large, t5-base or vit-l16, or
            `file.py:function` with a function of yours that returns what `cjax.parallelize` takes: (model, loss,
            optimizer, batch).
        target: cards to compile for, such as h100:64 or a100:8; machines of your own, such as
            h100:64/node=8,nvlink=450GB/s,network=8x50GB/s,price=2.5; or virtual devices, cpu:8. With --search, a card
            alone leaves the number to the search.
        plan: a plan, such as "tensor=8 zero=1"; give it several times to compare. With --search, "auto" and the words
            that every plan has to have: "auto precision=bfloat16".
        batch: rows of the global batch, for a built-in model; 1 for each device if not given.
        seq: tokens per row, for a built-in model; its context if not given.
        disk_folder: what plans with disk= want on virtual devices; nothing is written to it.
        budget: bytes that a device may hold, such as 70GiB, in plans that walk over layers: whether any of these can
            train the model there, and how fast, by arithmetic. All that a device has, if host or disk are given alone.
        host: bytes of host memory for the devices of one host, such as 1TiB; no limit if not given.
        disk: bytes of disk for the devices of one host, such as 4TiB; none if not given.
        search: predict all plans, without compiling, and list the best.
        objective: what is to be least: time, memory, cost or energy.
        price: dollars for an hour of one device.
        top: how many plans to list.
        verify: how many of these to compile.
        explain: say of the best plan what other values of its words would cost.
    """

    model: tyro.conf.Positional[str]
    target: str = "h100:8"
    plan: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    batch: int | None = None
    seq: int | None = None
    disk_folder: str | None = None
    budget: str | None = None
    host: str | None = None
    disk: str | None = None
    search: bool = False
    objective: str | None = None
    price: float | None = None
    top: int | None = None
    verify: int | None = None
    explain: bool = False

    @staticmethod
    def parse(arguments: Sequence[str]) -> "PlanCommand":
        return tyro.cli(PlanCommand, args=arguments, prog="cjax plan")

    def run(self) -> int:
        check_options(self, {"batch": 1, "seq": 1, "top": 1, "verify": 0})
        self._check_search()
        num_devices, devices = self._target()
        is_walk = any(size is not None for size in (self.budget, self.host, self.disk))
        answer = self._walk if is_walk else self._search if self.search else self._compare
        if ".py:" not in self.model:
            return answer(built_in(self.model, self.batch or num_devices, self.seq), devices)
        if self.batch is not None or self.seq is not None:
            raise ValueError("--batch and --seq are for built-in models; yours brings its own batch")
        parts = user_parts(self.model)
        return with_lines(Path(self.model.rpartition(":")[0]), lambda: answer(parts, devices))

    def _check_search(self) -> None:
        """Refuses options that go with a search without one, and several plans with one."""
        walked = [flag(name) for name in ("budget", "host", "disk") if getattr(self, name) is not None]
        if walked and self.search:
            raise ValueError(f"{', '.join(walked)} looks for plans by itself; leave out --search")
        if walked and len(self.plan) > 1:
            raise ValueError(f'{", ".join(walked)} takes one --plan: one of yours, or "auto" and words behind it')
        if walked:
            return
        names = ("objective", "price", "top", "verify", "explain")
        if not self.search and (given := [flag(name) for name in names if getattr(self, name) not in (None, False)]):
            raise ValueError(f"{', '.join(given)} {'goes' if len(given) == 1 else 'go'} with --search")
        if self.search and (len(self.plan) > 1 or any(not is_auto(plan) for plan in self.plan)):
            raise ValueError('--search takes one --plan: "auto", and behind it the words that every plan has to have')

    def _target(self) -> tuple[int, Any]:
        """How many devices to plan for, and which."""
        if (num_cpus := num_cpus_named(self.target)) is not None:
            if num_cpus < 1:
                raise ValueError(f"--target {self.target} is no device at all; write cpu:8")
            return num_cpus, training_devices(f"cpu:{num_cpus}")
        cluster = Cluster.parse(self.target)
        if cluster.num_devices is None and not self.search:
            raise ValueError(
                f"--target {cluster} says no number of cards; write {cluster.with_devices(8)}, or --search"
            )
        # Compiling needs XLA's GPU compiler and no GPU; JAX should not look for one.
        jax.config.update("jax_platforms", "cpu")
        return cluster.num_devices or ROWS, cluster

    def _compare(self, parts: tuple[Any, Any, Any, Any], devices: Any) -> int:
        given = self.plan or ("auto",)
        if len(given) == 1:
            print(self._program(parts, given[0], devices).report())
            return 0
        # Any plan will do to trace the model; `auto` would search for one that nobody asked for.
        comparison = self._program(parts, "data=-1", devices).compare(list(given))
        print(f"{self.model} on {self.target}\n\n{comparison}")
        return 0 if comparison.reports else 1

    def _program(self, parts: tuple[Any, Any, Any, Any], plan: str, devices: Any) -> Program:
        return parallelize(*parts, plan=plan, devices=devices, disk_folder=self.disk_folder)

    def _walk(self, parts: tuple[Any, Any, Any, Any], devices: Any) -> int:
        for name in ("objective", "price", "verify", "explain", "disk_folder"):
            if getattr(self, name) not in (None, False):
                raise ValueError(f"{flag(name)} does not go with --budget, --host and --disk, which only calculate")
        plan = self.plan[0] if self.plan else "auto"
        found = walk_plans(parts, devices, self.budget, self.host, self.disk, plan=plan, top=self.top or 8)
        print(f"{self.model} on {self.target}\n\n{found}")
        return 0

    def _search(self, parts: tuple[Any, Any, Any, Any], devices: Any) -> int:
        found = plans(
            parts,
            devices,
            check_objective(self.objective or "time"),
            self.top or 8,
            self.verify or 0,
            plan=self.plan[0] if self.plan else "auto",
            price=self.price,
        )
        print(f"{self.model} on {self.target}\n\n{found}")
        if self.explain:
            print(f"\n{found.explain()}")
        return 0
