"""Colossal-AI's configuration as a plan's text: its config dict and its Booster plugins' arguments. Knows no Plan."""

import re
import warnings
from collections.abc import Mapping
from typing import Any

# Asked for by name there, done by XLA, Flax or cjax unasked here: named in one warning, then forgotten.
NEEDLESS = {
    "XLA schedules, fuses and overlaps": (
        *("broadcast_buffers", "ddp_bucket_cap_mb", "find_unused_parameters", "check_reduction"),
        *("gradient_as_bucket_view", "static_graph", "zero_bucket_size_in_m", "reduce_bucket_size_in_m"),
        *("overlap_communication", "overlap_allgather", "overlap_p2p", "enable_metadata_cache"),
        *("enable_all_optimization", "enable_fused_normalization", "enable_flash_attention", "enable_jit_fused"),
        *("parallel_output", "scheduler_nodes", "dp_outside", "cudnn_benchmark", "cudnn_deterministic", "torch_ddp"),
        *("gradient_handler", "enable_async_reduce", "backend", "verbose", "logging", "shard_strategy", "cast_inputs"),
        *("reduce_scatter_bucket_size_mb", "gradient_predivide_factor", "reuse_fp16_shard"),
    ),
    "parameters are sharded one by one, not in chunks": (
        *("chunk_config_dict", "chunk_init_device", "search_range_m", "hidden_dim", "min_chunk_size_m"),
        *("min_chunk_size_mb", "max_prefetch", "memstats", "pin_memory", "strict_ddp_mode", "force_outputs_fp32"),
        *("warmup_non_model_data_ratio", "steady_cuda_cap_ratio", "gpu_margin_mem_ratio"),
    ),
    "dims are padded where they must be": ("make_vocab_size_divisible_by",),
    "every plan accumulates": ("enable_gradient_accumulation",),
    "program.init(seed) takes one": ("seed",),
}
# Theirs are shares of a class or wherever there is room, and ours are bytes: nobody can tell one from the other.
OFFLOAD = 'leave it out, and give Plan(..., offload="{}"), or budget="16GiB", bytes of a device, and the rest is chosen'
# No plan can say it, but someone else can: each key with who.
ELSEWHERE = {
    **dict.fromkeys(("clip_grad_norm", "max_norm"), "clip in the optimizer: optax.clip_by_global_norm"),
    **dict.fromkeys(
        ("initial_scale", "min_scale", "max_scale", "growth_factor", "backoff_factor", "growth_interval", "hysteresis"),
        "give parallelize loss_scale=cjax.optim.LossScale(initial=...); precision=bfloat16 needs none",
    ),
    **dict.fromkeys(("norm_type",), "clip in the optimizer, by any norm"),
    **dict.fromkeys(("cpu_offload", "offload_optim_frac", "offload_optimizer_config"), OFFLOAD.format("optimizer")),
    **dict.fromkeys(("offload_param_frac", "offload_param_config"), OFFLOAD.format("params")),
    **dict.fromkeys(("fp8_communication", "use_fp8"), "plans have no fp8; write precision=bfloat16"),
    "custom_policy": "nothing to write: layouts come from the trace; Plan(rules=...) changes one",
    "num_layers_per_stage": "stages are balanced by cost",
    "inner_ring_size": "a ring is one ring",
    "extra_dp_size": "write the size of a ZeRO group instead, as in zero=3/8",
    "microbatch_size": "write num_microbatches, the batch divided by microbatch_size",
    "gradient_checkpoint_config": 'say what is recomputed: remat="block", or remat="dots"',
}
PRECISIONS = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
PLUGIN_STAGES = {
    "gemini": 3,
    "torch_fsdp": 3,
    "low_level_zero": 1,
    "hybrid_parallel": 0,
    "moe_hybrid_parallel": 0,
    "3d": 0,
    "torch_ddp": 0,
}
SEQUENCE_MODES = {"split_gather": "gather", "ring": "gather", "all_to_all": "all_to_all", "ring_attn": "ring"}
SCHEDULES = {"1f1b": "1f1b", "interleaved": "interleaved", "zbv": "zero_bubble"}


def plan_text(given: Mapping[str, Any]) -> str:
    """The text of the plan that a Colossal-AI configuration asks for; see `Plan.from_colossal`."""
    config = _Config(given)
    readers = (_data, _tensor, _sequence, _pipeline, _expert, _microbatches, _zero, _precision, _reduce, _remat)
    words = [reader(config) for reader in readers]
    config.finish()
    return " ".join(word for word in words if word)


class _Config:
    """A configuration being read: each key is taken by one reader, or is judged at the end."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.left = dict(given)
        self.problems: list[str] = []
        self.notes: list[str] = []
        for section in ("parallel", "model", "schedule"):
            self.unfold(section)

    def take(self, *keys: str) -> Any:
        """The value of the first of these synonyms that is given; it is a problem when they disagree."""
        values = {key: self.left.pop(key) for key in keys if key in self.left}
        given = {key: value for key, value in values.items() if value is not None}
        if len({repr(value) for value in given.values()}) > 1:
            self.problems.append(" and ".join(f"{key}={value!r}" for key, value in given.items()) + ": which of them?")
        return next(iter(given.values()), None)

    def number(self, *keys: str) -> int:
        """Like `take`, for a number of devices or pieces; 1 when not given."""
        value = self.take(*keys)
        if value is None:
            return 1
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self.problems.append(f"{keys[-1]}={value!r}: a whole number of at least 1 is needed")
            return 1
        return value

    def word(self, key: str, value: Any, known: Mapping[str, str]) -> str:
        """Their word in ours; empty, with a problem noted, when there is none."""
        name = str(value).lower()
        if name not in known:
            self.problems.append(f"{key}={value!r}: known are {', '.join(known)}")
        return known.get(name, "")

    def unfold(self, section: str, short: str = "size") -> bool:
        """Puts a nested dict's keys beside the others, as `section.key`; a bare value is that of `short`."""
        if self.left.get(section) is None:
            return self.left.pop(section, None) is not None
        value = self.left.pop(section)
        nested = value if isinstance(value, Mapping) else {short: value}
        self.left |= {f"{section}.{key}": inner for key, inner in nested.items()}
        return True

    def finish(self) -> None:
        """Judges what no reader took: needless, impossible or unknown."""
        needless = {key: why for why, keys in NEEDLESS.items() for key in keys}
        for path, value in self.left.items():
            key = path.rpartition(".")[2]
            if key in needless:
                self.notes.append(f"{path} is needless ({needless[key]})")
            elif key not in ELSEWHERE:
                self.problems.append(
                    f"{path}={value!r}: no key of Colossal-AI's known here; if it is yours, take it out"
                )
            elif value:  # switched off (None, False, 0), such a key asks for what a plan does anyway
                self.problems.append(f"{path}={value!r}: {ELSEWHERE[key]}")
        if self.problems:
            raise ValueError("not all of this configuration can be a plan:\n    " + "\n    ".join(self.problems))
        if self.notes:
            warnings.warn("from_colossal: " + "; ".join(self.notes), UserWarning, stacklevel=4)


def _data(config: _Config) -> str:
    size = config.take("parallel.data", "dp_size")
    return "" if size is None else f"data={size}"


def _tensor(config: _Config) -> str:
    config.unfold("parallel.tensor")
    size, depth = config.number("parallel.tensor.size", "tp_size"), config.number("parallel.tensor.depth")
    mode = str(config.take("parallel.tensor.mode") or "1d").lower()
    if mode == "sequence":  # theirs is a tensor mode; the ring over a sequence axis is what it does
        config.left |= {"enable_sequence_parallelism": True, "sequence_parallelism_mode": "ring_attn", "sp_size": size}
        return ""
    mode = config.word("tensor mode", mode, {name: name for name in ("1d", "2d", "2.5d", "3d")})
    return f"tensor={mode}:{size}" + (f"/{depth}" if depth > 1 else "") if size > 1 and mode else ""


def _sequence(config: _Config) -> str:
    enabled, size = config.take("enable_sequence_parallelism"), config.number("sp_size")
    mode = config.take("sequence_parallelism_mode")
    if not enabled:
        if size > 1:
            config.problems.append(f"sp_size={size}: does nothing without enable_sequence_parallelism=True")
        if mode:
            config.notes.append(f"sequence_parallelism_mode={mode!r} does nothing without enable_sequence_parallelism")
        return ""
    ours = config.word("sequence_parallelism_mode", mode, SEQUENCE_MODES)
    if ours == "gather" and size > 1:
        config.notes.append(f"sp_size={size} is needless ({mode} lives on the tensor axis)")
    return "sequence=gather" if ours == "gather" else f"sequence={ours}:{size}" if ours and size > 1 else ""


def _pipeline(config: _Config) -> str:
    config.unfold("parallel.pipeline")
    size, chunks = (
        config.number("parallel.pipeline.size", "pp_size"),
        config.number("model.num_chunks", "num_model_chunks"),
    )
    style = config.take("pp_style") or ("interleaved" if chunks > 1 else "1f1b")
    schedule = config.word("pp_style", style, SCHEDULES)
    if size == 1 and (style, chunks) != ("1f1b", 1):
        config.notes.append(f"pp_style={style!r} with {chunks} chunks does nothing on one stage")
    return f"pipeline={schedule}:{size}" + (f"/{chunks}" if chunks > 1 else "") if size > 1 and schedule else ""


def _expert(config: _Config) -> str:
    size = config.number("ep_size")
    return f"expert={size}" if size > 1 else ""


def _microbatches(config: _Config) -> str:
    pieces = config.number("NUM_MICRO_BATCHES", "schedule.num_microbatches", "num_microbatches")
    steps = config.number("gradient_accumulation")
    if steps > 1:
        config.notes.append(
            f"gradient_accumulation={steps}: give step() {steps} loader batches as one, it cuts them up"
        )
    return f"microbatches={pieces * steps}" if pieces * steps > 1 else ""


def _zero(config: _Config) -> str:
    stage, plugin = config.take("zero_stage", "stage"), config.take("plugin")
    policy, share = config.take("placement_policy"), config.take("shard_param_frac")
    gemini = policy is not None or share is not None
    if plugin is not None:
        name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", str(plugin).removesuffix("Plugin"))  # TorchDDP -> Torch_DDP
        default = config.word("plugin", name, {name: str(stage) for name, stage in PLUGIN_STAGES.items()})
        stage = default if stage is None else stage
    if config.unfold("zero"):
        level = str(config.take("zero.type") or "Level_3")
        stage = level.rpartition("_")[2]
        config.unfold("zero.model_config")
        config.unfold("zero.optimizer_config")
        policy = config.take("zero.model_config.tensor_placement_policy") or policy
    if gemini:
        stage = {None: 3, 0: 2, 1: 3}.get(share)
        if stage is None:
            config.problems.append(f"shard_param_frac={share!r}: parameters are sharded (1) or whole (0)")
    if policy not in (None, "static", "cuda"):
        config.problems.append(f"placement policy {policy!r}: {OFFLOAD.format('params+optimizer')}")
    if config.take("master_weights") is False:
        config.problems.append("master_weights=False: master weights are always kept, in float32")
    return f"zero={stage}" if stage not in (None, 0, "0") else ""


def _precision(config: _Config) -> str:
    config.unfold("fp16", short="enabled")
    if config.take("fp16.mode") is not None or config.take("fp16.enabled"):
        config.left.setdefault("fp16.precision", "fp16")
    precision = config.take("fp16.precision", "precision", "mixed_precision")
    return f"precision={config.word('precision', precision, PRECISIONS)}" if precision is not None else ""


def _reduce(config: _Config) -> str:
    dtype = config.take("communication_dtype")
    if config.take("fp32_reduce_scatter"):
        return "reduce=float32"
    name = str(dtype).removeprefix("torch.")
    known = PRECISIONS | {name: name for name in PRECISIONS.values()}
    return "" if dtype is None else f"reduce={config.word('communication_dtype', name, known)}"


def _remat(config: _Config) -> str:
    keys = ("enable_gradient_checkpointing", "gradient_checkpointing", "grad_checkpoint")
    return "remat=block" if config.take(*keys) else ""
