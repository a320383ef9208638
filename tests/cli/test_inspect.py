import os
from pathlib import Path

import numpy as np
from forked import Forks

from cjax.checkpoint import save


def test_it_shows_a_checkpoint_without_starting_jax(tmp_path: Path, forks: Forks):
    save(tmp_path / "c", {"params": {"w": np.ones((3, 4), np.float32)}}, {"step": 12, "plan": "data=2"})
    code = "import sys; from cjax.cli import main; sys.exit(main())"
    environment = os.environ | {"JAX_PLATFORMS": "a platform that does not exist"}
    ran = forks.run(["-c", code, "inspect", str(tmp_path / "c")], environment)
    assert ran.returncode == 0, ran.stderr
    assert "step        12" in ran.stdout and "params/w  float32[3, 4]" in ran.stdout
