from pathlib import Path

import numpy as np

from cjax.checkpoint import save

from .test_main import run


def test_it_shows_a_checkpoint_without_starting_jax(tmp_path: Path):
    save(tmp_path / "c", {"params": {"w": np.ones((3, 4), np.float32)}}, {"step": 12, "plan": "data=2"})
    ran = run("inspect", str(tmp_path / "c"), JAX_PLATFORMS="a platform that does not exist")
    assert ran.returncode == 0, ran.stderr
    assert "step        12" in ran.stdout and "params/w  float32[3, 4]" in ran.stdout
