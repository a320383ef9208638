"""Plans predicted and measured: what is tried, and that both numbers of a plan come to be said."""

import flax.linen as nn
import numpy as np
import pytest
from planner_measured import compare
from predicted.models import Setting, classified, settings

from cjax.plan import Plan
from cjax.planner.profile import Profile, machine_of, write_profile


@pytest.mark.parametrize("setting", settings(), ids=lambda setting: setting.name)
def test_each_model_has_twelve_plans_for_eight_devices(setting: Setting) -> None:
    plans = {str(Plan.parse(text).resolve(8)) for text in setting.plans}
    assert len(plans) == 12
    assert all(Plan.parse(text).num_devices == 8 for text in plans)


class Small(nn.Module):
    @nn.compact
    def __call__(self, images):
        return nn.Dense(10)(nn.relu(nn.Dense(16)(images.reshape(images.shape[0], -1))))


def test_what_is_predicted_stands_beside_what_is_measured(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    rates = dict.fromkeys(("float32", "bfloat16", "float16"), 1e10)
    write_profile(Profile("cpu", machine_of("cpu"), 8, True, rates, 0.0, 1e9, {"all-gather": 1e9}, 1e-4, 1e-4, "", ""))
    batch = {"images": np.ones((16, 4, 4, 3), np.float32), "labels": np.zeros(16, np.int32)}
    said: list[str] = []
    compare(Setting("Small", Small(), classified, batch, ("data=8", "data=8 zero=3")), 2, said.append)
    assert said[0].startswith("Small:")
    assert [line.split()[0] for line in said[1:3]] == ["data=8", "data=8"]
    assert all("measured" in line and "predicted" in line and "optimizer" in line for line in said[1:3])
    assert "Spearman" in said[3]
