"""Colossal-AI's configurations, as its users wrote them, and the plans they become."""

import warnings

import pytest

from cjax.plan import Plan


@pytest.mark.parametrize(
    "config, plan",
    [
        ({}, "data=-1"),
        ({"parallel": None}, "data=-1"),
        ({"parallel": {"pipeline": 1, "tensor": {"size": 1, "mode": None}}}, "data=-1"),
        ({"parallel": {"pipeline": 2, "tensor": {"size": 4, "mode": "2d"}}}, "tensor=2d:4 pipeline=1f1b:2"),
        ({"parallel": {"tensor": {"size": 8, "mode": "2.5d", "depth": 2}}}, "tensor=2.5d:8/2"),
        ({"parallel": {"tensor": {"size": 8, "mode": "3d"}, "data": 2}}, "data=2 tensor=3d:8"),
        ({"parallel": {"tensor": {"size": 4, "mode": "sequence"}}}, "sequence=ring:4"),
        ({"parallel": {"pipeline": {"size": 4}}, "NUM_MICRO_BATCHES": 8}, "pipeline=1f1b:4 microbatches=8"),
        ({"parallel": {"pipeline": 4}, "model": {"num_chunks": 2}}, "pipeline=interleaved:4/2"),
        ({"schedule": {"num_microbatches": 4}, "parallel": {"pipeline": 2}}, "pipeline=1f1b:2 microbatches=4"),
        ({"fp16": {"mode": "AMP_TYPE.NAIVE"}}, "precision=float16"),
        ({"precision": "bf16", "communication_dtype": "torch.float32"}, "precision=bfloat16 reduce=float32"),
        ({"communication_dtype": "bf16", "zero_stage": 1}, "zero=1 reduce=bfloat16"),
        ({"zero_stage": 2, "fp32_reduce_scatter": True}, "zero=2 reduce=float32"),
        ({"fp16": None}, "data=-1"),
        ({"zero": {"model_config": {"tensor_placement_policy": "cuda"}, "optimizer_config": {}}}, "zero=3"),
        ({"zero": {"type": "ZeroRedundancyOptimizer_Level_2"}}, "zero=2"),
        ({"zero": None}, "data=-1"),
        ({"tp_size": 2, "pp_size": 2, "zero_stage": 1, "precision": "bf16", "num_microbatches": 4},
         "tensor=2 pipeline=1f1b:2 microbatches=4 zero=1 precision=bfloat16"),
        ({"tp_size": 1, "pp_size": 2, "pp_style": "zbv", "num_model_chunks": 2}, "pipeline=zero_bubble:2/2"),
        ({"tp_size": 1, "pp_size": 2, "pp_style": "interleaved", "num_model_chunks": 3}, "pipeline=interleaved:2/3"),
        ({"tp_size": 4, "enable_sequence_parallelism": True, "sequence_parallelism_mode": "split_gather"},
         "tensor=4 sequence=gather"),
        ({"sp_size": 4, "enable_sequence_parallelism": True, "sequence_parallelism_mode": "all_to_all"},
         "sequence=all_to_all:4"),
        ({"sp_size": 4, "enable_sequence_parallelism": True, "sequence_parallelism_mode": "ring_attn"},
         "sequence=ring:4"),
        ({"stage": 2, "precision": "fp32"}, "zero=2"),
        ({"plugin": "GeminiPlugin"}, "zero=3"),
        ({"plugin": "gemini", "shard_param_frac": 0.0}, "zero=2"),
        ({"placement_policy": "static", "tp_size": 2}, "tensor=2 zero=3"),
        ({"plugin": "TorchFSDPPlugin"}, "zero=3"),
        ({"plugin": "TorchDDPPlugin"}, "data=-1"),
        ({"plugin": "LowLevelZeroPlugin", "stage": 2}, "zero=2"),
        ({"plugin": "low_level_zero"}, "zero=1"),
        ({"plugin": "HybridParallelPlugin", "zero_stage": 2}, "zero=2"),
        ({"plugin": "MoeHybridParallelPlugin", "ep_size": 4, "zero_stage": 1}, "expert=4 zero=1"),
        ({"ep_size": 1, "tp_size": 2}, "tensor=2"),
        ({"tp_size": 2, "enable_gradient_checkpointing": True}, "tensor=2 remat=block"),
        ({"max_norm": 0.0, "cpu_offload": False, "custom_policy": None, "master_weights": True}, "data=-1"),
    ],
)  # fmt: skip
def test_becomes(config: dict, plan: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert str(Plan.from_colossal(config)) == plan
        assert str(Plan.from_colossal(**config)) == plan


@pytest.mark.parametrize(
    "config, plan, message",
    [
        ({"tp_size": 2, "overlap_communication": True}, "tensor=2", "overlap_communication is needless"),
        ({"gradient_accumulation": 4}, "microbatches=4", "give step.. 4 loader batches as one"),
        ({"tp_size": 2, "make_vocab_size_divisible_by": 64}, "tensor=2", "dims are padded"),
        ({"seed": 1024}, "data=-1", r"program.init\(seed\)"),
        ({"sequence_parallelism_mode": "ring"}, "data=-1", "does nothing without"),
        ({"pp_size": 1, "pp_style": "zbv", "num_model_chunks": 2}, "data=-1", "does nothing on one stage"),
        ({"tp_size": 2, "sp_size": 2, "enable_sequence_parallelism": True, "sequence_parallelism_mode": "ring"},
         "tensor=2 sequence=gather", "sp_size=2 is needless"),
    ],
)  # fmt: skip
def test_needless_keys_are_named(config: dict, plan: str, message: str) -> None:
    with pytest.warns(UserWarning, match=message) as caught:
        assert str(Plan.from_colossal(config)) == plan
    assert len(caught) == 1 and caught[0].filename == __file__  # the warning points at the caller


@pytest.mark.parametrize(
    "config, message",
    [
        ({"BATCH_SIZE": 128}, "BATCH_SIZE=128: no key of Colossal-AI's"),
        ({"paralel": {}}, "paralel"),
        ({"parallel": {"tensor": {"size": 4, "mode": "2d", "dept": 2}}}, "parallel.tensor.dept=2"),
        ({"parallel": {"tensor": {"size": 4, "mode": "4d"}}}, "tensor mode='4d': known are 1d, 2d"),
        ({"parallel": {"tensor": {"size": 8, "mode": "2d"}}}, "2d needs q.q devices"),
        ({"clip_grad_norm": 1.0}, "optax.clip_by_global_norm"),
        ({"max_norm": 1.0}, "optax.clip_by_global_norm"),
        ({"microbatch_size": 2}, "write num_microbatches"),
        ({"cpu_offload": True}, 'offload="optimizer"'),
        ({"placement_policy": "auto"}, 'budget="16GiB"'),
        ({"shard_param_frac": 0.5}, "shard_param_frac=0.5"),
        ({"zero": {"model_config": {"tensor_placement_policy": "cpu"}}}, 'offload="params.optimizer"'),
        ({"fp16": {"mode": "torch", "initial_scale": 32}}, "fp16.initial_scale=32: give parallelize loss_scale="),
        ({"precision": "fp8"}, "precision='fp8': known are fp16, bf16, fp32"),
        ({"sp_size": 2}, "does nothing without enable_sequence_parallelism"),
        ({"sp_size": 2, "enable_sequence_parallelism": True}, "sequence_parallelism_mode=None"),
        ({"tp_size": 2, "parallel": {"tensor": {"size": 4, "mode": "1d"}}}, "which of them"),
        ({"tp_size": "2"}, "a whole number"),
        ({"plugin": "PaddlePlugin"}, "plugin="),
        ({"ep_size": "2"}, "a whole number"),
        ({"ep_size": 2, "parallel": {"tensor": {"size": 4, "mode": "2d"}}}, "expert=2 does not go with the grid"),
        ({"master_weights": False}, "always kept"),
        ({"extra_dp_size": 2}, "zero=3/8"),
        ({"num_layers_per_stage": [3, 5]}, "balanced by cost"),
    ],
)
def test_refused(config: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan.from_colossal(config)


def test_all_problems_at_once() -> None:
    with pytest.raises(ValueError) as caught:
        Plan.from_colossal({"clip_grad_norm": 1.0, "BATCH_SIZE": 4}, cpu_offload=True)
    assert all(key in str(caught.value) for key in ("clip_grad_norm", "BATCH_SIZE", "cpu_offload"))
