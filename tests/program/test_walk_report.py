"""The programs of a walk together: what runs for each layer counts for each layer."""

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from contract import walking_program

from cjax.audit import Audit, audit
from cjax.audit.facts import Collective
from cjax.machines import Cluster
from cjax.planner.hardware import hardware_of_cluster
from cjax.planner.homes import Homes
from cjax.program import walk_report
from cjax.program.walk_report import num_tokens

from .conftest import make, rows

H100 = hardware_of_cluster(Cluster.parse("h100:8"), 8)


@functools.cache
def nothing() -> Audit:
    return audit(jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((4,), np.float32)).compile(), None)


def piece(name: str, calls: int, flops: float, sent: float = 0.0) -> Any:
    """A program of a walk with so many operations and bytes sent, and what was counted in it."""
    each = Collective("all-reduce", ("data",), 8, (tuple(range(8)),), (), sent, 1, name)
    counted = dataclasses.replace(nothing(), flops=flops, collectives=(each,) if sent else (), uncounted=(name,))
    return SimpleNamespace(name=name, calls=calls), counted


def test_a_step_computes_what_its_programs_do_as_often_as_they_run() -> None:
    program = walking_program("linen_tied", "data=8 offload=params")
    measured = program._walking.measured  # type: ignore[union-attr]
    audits = [
        *(piece("enter", 1, 1e9), piece("forward 0", 6, 1e12)),
        *(piece("after", 1, 5e10), piece("backward 0", 6, 2e12)),
    ]
    cost = walk_report.cost_of(program._composed, measured, audits, H100)
    peak = H100.matmul_flops("float32")
    found = cost(Homes.all_at("host", program._composed.walker.lengths)).seconds  # type: ignore[union-attr]
    assert peak is not None
    assert found["forward"].compute == pytest.approx((1e9 + 6e12) / peak)
    assert sum(each.compute for each in found.values()) == pytest.approx((1e9 + 6e12 + 5e10 + 12e12) / peak)


def test_what_is_sent_for_each_layer_is_sent_as_often() -> None:
    whole = walk_report._together(
        [piece("after", 1, 3.0, 100.0), piece("forward 0", 6, 2.0, 10.0), piece("leave", 2, 1.0)]
    )
    assert [each.total_bytes for each in whole.collectives] == [100.0, 60.0]
    assert (whole.flops, whole.memory, whole.uncounted) == (17.0, None, ("after", "forward 0", "leave"))


def test_tokens_are_those_of_texts_and_else_rows() -> None:
    assert num_tokens(make("data=8", batch=rows(24))._composed) == 24
    program = walking_program("linen_tied", "data=8 offload=params")
    shapes = [leaf.shape for leaf in jax.tree.leaves(program._composed.batch_shape) if leaf.dtype.kind in "iu"]
    assert len(shapes[0]) == 2 and num_tokens(program._composed) == shapes[0][0] * shapes[0][1] > shapes[0][0]
