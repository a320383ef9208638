"""A worker of a job that was submitted as `train.py:make`: trains under the plan that the cluster chose."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import optax

from cjax.cluster.reading import JobParts
from cjax.cluster.submitted import WAY
from cjax.mesh import initialize
from cjax.parallelize import parallelize
from cjax.train import fit


def main(file: str, function: str, *arguments: str) -> int:
    """Until the job is done, or told to leave; the exit status."""
    way: dict[str, Any] = json.loads(os.environ[WAY])
    initialize()
    parts = JobParts(Path(file), function, arguments)
    adapts, rows = way["rule"] is not None, int(way["batch"])
    # All that an optimizer does times a number is its rate of learning times that; also at 1, so that its state is the
    # same tree at any batch.
    optimizer = optax.chain(parts.optimizer, optax.scale(way["rate"])) if adapts else parts.optimizer
    program = parallelize(
        parts.model, parts.loss, optimizer, parts.shape(rows), way["plan"] or "auto", measure_noise=adapts
    )
    data = replace(parts.with_batch(rows), shard=program.data_shard)
    return fit(program, data, steps=way["steps"], checkpoint_every="auto", log_every=1 if adapts else 10).exit_code
