"""Plans predicted and measured: what is tried, and that both numbers of a plan come to be said."""

import flax.linen as nn
import numpy as np
import pytest
from planner_measured import compare
from predicted.models import Setting, classified

from cjax.planner.profile import Profile, machine_of, write_profile


class Small(nn.Module):
    @nn.compact
    def __call__(self, images):
        return nn.Dense(10)(nn.relu(nn.Dense(16)(images.reshape(images.shape[0], -1))))


@pytest.mark.full
def test_what_is_predicted_stands_beside_what_is_measured(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    rates = dict.fromkeys(("float32", "bfloat16", "float16"), 1e10)
    write_profile(Profile("cpu", machine_of("cpu"), 8, True, rates, 0.0, 1e9, {"all-gather": 1e9}, 1e-4, 1e-4, "", ""))
    batch = {"images": np.ones((16, 4, 4, 3), np.float32), "labels": np.zeros(16, np.int32)}
    said: list[str] = []
    compare(Setting("Small", Small(), classified, batch), 2, said.append, count=2)
    assert said[0].startswith("Small: 2 of")
    assert len({line.split("measured")[0] for line in said[1:3]}) == 2
    assert all("measured" in line and "predicted" in line and "(" in line for line in said[1:3])
    assert "Spearman" in said[3]
