"""`cjax train`."""

import contextlib
import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import jax
import numpy as np
import optax
import tyro

from cjax.cli.devices import training_devices
from cjax.cli.options import check_options, flag
from cjax.data import TextData, text_data
from cjax.jax_compat.backends import each_process_writes_its_cache
from cjax.job import member
from cjax.job.files import write_whole
from cjax.job.folder import JobFolder, new_run
from cjax.job.lock import is_locked
from cjax.mesh import initialize
from cjax.models import GPT, generate, gpt, loss
from cjax.optim import lamb, lars, weights_only
from cjax.parallelize import parallelize
from cjax.program import Program, State
from cjax.train import (
    Callback,
    EarlyStop,
    LossSpike,
    MLflow,
    ProfileSteps,
    Prometheus,
    TensorBoard,
    WandB,
    Writer,
    fit,
)

_VALIDATION_BATCHES = 8
_AUTO = "auto"


@dataclasses.dataclass(frozen=True)
class Train:
    """Trains a built-in model on text.

    By default: a small GPT on the source text of Python's standard library, over 8 devices, virtual ones where there
    is no accelerator. Leaves a folder with metrics, plan, report, checkpoints and a sample of text.

    Attributes:
        model: gpt-mini, gpt2, gpt2-medium, gpt2-large, gpt2-xl, gpt3-175b.
        data: a text file, a folder of them, or a token file (.bin, uint16); Python's standard library if not given.
        vocabulary: a folder with GPT-2's vocab.json and merges.txt; text is read as bytes if not given.
        plan: how the devices are used, such as "data=4 tensor=2 zero=1 precision=bfloat16"; where not given, a pair of
            devices shares the tensors and the rest share the batch, with zero=1.
        devices: how many; "cpu:8" for virtual ones even where there are others.
        steps: of the whole run, those before a resume included.
        batch: rows of the global batch.
        seq: tokens per row.
        learning_rate: the highest, reached after the warm-up; it then falls to a tenth of it.
        warmup: steps; a tenth of all, but at most 1000, if not given.
        optimizer: adamw, lamb, lars, or sgd with momentum.
        weight_decay: of kernels and embeddings.
        dropout: of the model.
        seed: of the weights, the dropout and the order of the data.
        folder: of the run; a new one below `runs` if not given.
        resume: the folder of a run to go on with; options given beside it replace those of the run. "auto" goes on with
            the run in --folder, and begins it where nothing was kept of it yet.
        verify: check the plan before the first step against one device, and refuse to train if it computes otherwise.
        disk_folder: where plans with disk= keep what they move there; made if it is missing.
        on_nan: what to do at a step that is not finite; rollback goes back to the last checkpoint, and on behind the
            data read so far.
        on_spike: what to do at a loss far above those before it.
        verify_copies_every: steps between comparisons of what several devices hold alike; none are made if not given.
        on_corrupt: what to do where a device has other bits than the others; rollback goes back to the last
            checkpoint, and on with the same batches.
        checkpoint_every: steps between checkpoints, or "auto" for as often as loses least.
        between_failures: hours, on average, between failures of the run, for "auto"; a day if not given.
        snapshot_every: steps between copies of the state in host memory, which --resume and `cjax run --workers` go on
            from first; none are made if not given.
        snapshot_peers: each process also keeps the copies of one on another host, which may lose its memory then.
        watchdog: end a run that hangs, with the stacks of its threads and status 75, "again".
        keep: how many checkpoints stay.
        best: also keep the checkpoint with the least validation loss.
        patience: evaluations without a better one, after which the run ends; it runs to its end if not given.
        evaluate_every: steps between evaluations on held-out text.
        log_every: steps between lines of metrics.
        sample: tokens of text to generate at the end.
        tensorboard: also write TensorBoard's event files.
        log: where else metrics go: tensorboard, wandb (offline), mlflow (files), prometheus (metrics.prom); all in the
            run's folder.
        hardware: read what the hardware does, and draw it in report.html.
        profile: steps to take a trace of, such as 10:12.
    """

    model: tyro.conf.Positional[str] = "gpt-mini"
    data: str | None = None
    vocabulary: str | None = None
    plan: str | None = None
    devices: str | None = None
    steps: int = 300
    batch: int = 16
    seq: int = 128
    learning_rate: float = 2e-3
    warmup: int | None = None
    optimizer: Literal["adamw", "lamb", "lars", "sgd"] = "adamw"
    weight_decay: float = 0.1
    dropout: float = 0.0
    seed: int = 0
    folder: str | None = None
    resume: str | None = None
    verify: bool = False
    disk_folder: str | None = None
    on_nan: Literal["stop", "skip", "rollback"] = "stop"
    on_spike: Literal["stop", "rollback"] | None = None
    verify_copies_every: int | None = None
    on_corrupt: Literal["stop", "rollback"] = "stop"
    checkpoint_every: int | Literal["auto"] = 100
    between_failures: float | None = None
    snapshot_every: int | None = None
    snapshot_peers: bool = False
    watchdog: bool = False
    keep: int = 3
    best: bool = False
    patience: int | None = None
    evaluate_every: int = 100
    log_every: int = 10
    sample: int = 200
    tensorboard: bool = False
    log: tuple[Literal["tensorboard", "wandb", "mlflow", "prometheus"], ...] = ()
    hardware: bool = False
    profile: str | None = None

    @staticmethod
    def parse(arguments: Sequence[str]) -> "Train":
        options = tyro.cli(Train, args=arguments, prog="cjax train")
        if options.resume is None and options.folder is None and (mine := member()) is not None:
            arguments = [*arguments, "--resume", _AUTO, "--folder", str(mine.folder)]
            options = dataclasses.replace(options, resume=_AUTO, folder=str(mine.folder))
        if options.resume is None:
            return options
        if options.resume == _AUTO:
            if options.folder is None:
                raise ValueError("--resume auto goes on with the run in --folder, or begins it there: give --folder")
            file = Path(options.folder) / "options.json"
            known = _read_options(file) if file.is_file() else options
            return tyro.cli(Train, args=arguments, prog="cjax train", default=known)
        # Once more, with the options of the run in place of the usual ones: what is typed now still wins.
        file = Path(options.resume) / "options.json"
        if not file.is_file():
            hint = f"; what cjax.train.fit began goes on with fit(..., folder={options.resume!r}, resume=True)"
            raise FileNotFoundError(
                f"{options.resume} is not the folder of a run of cjax train: there is no {file}"
                + (hint if (file.parent / "checkpoints").is_dir() else "")
            )
        return tyro.cli(Train, args=arguments, prog="cjax train", default=_read_options(file))

    def run(self) -> int:
        self._check()
        initialize()
        devices = training_devices(self.devices)
        data = self._data()
        config = gpt(self.model, vocab_size=data.vocab_size, dropout=self.dropout)
        shape = jax.ShapeDtypeStruct((self.batch, self.seq), "int32")
        program = parallelize(
            lambda rngs: GPT(config, rngs=rngs),
            loss,
            self._optimizer(),
            {"inputs": shape, "targets": shape},
            plan=self.plan or ("tensor=2 zero=1" if len(devices) % 2 == 0 else "zero=1"),
            devices=devices,
            verify=self.verify,
            disk_folder=self.disk_folder,
        )
        data = dataclasses.replace(data, shard=program.data_shard)
        folder = self._folder()  # where all that may be refused before it is made has been
        writers = self._writers(folder) if jax.process_index() == 0 else []
        say = print if jax.process_index() == 0 else lambda *_: None
        say(f"{self.model}: {config.num_params / 1e6:.1f} M parameters, {len(data.train) / 1e6:.1f} M tokens of text")
        say(f"plan {program.plan} on {len(devices)} x {devices[0].device_kind}; folder {folder}")
        _keep_compiled(folder)
        with self._remembered(folder):
            result = fit(
                program,
                data,
                steps=self.steps,
                seed=self.seed,
                folder=folder,
                resume="auto" if self.resume == _AUTO else self.resume is not None,
                validation=lambda: data.validation(_VALIDATION_BATCHES),
                evaluate_every=self.evaluate_every,
                checkpoint_every=self.checkpoint_every,
                between_failures=None if self.between_failures is None else 3600 * self.between_failures,
                snapshot_every=self.snapshot_every,
                snapshot_peers=self.snapshot_peers,
                watchdog="auto" if self.watchdog else None,
                keep=self.keep,
                best="validation_loss" if self.best else None,
                on_nan=self.on_nan,
                verify_copies_every=self.verify_copies_every,
                on_corrupt=self.on_corrupt,
                log_every=self.log_every,
                log=writers,
                learning_rate=self._schedule(),
                hardware=self.hardware,
                callbacks=self._callbacks(),
                tensorboard=self.tensorboard,
                resume_command=f"cjax train --resume {folder}",
            )
        if result.exit_code:
            return result.exit_code
        final = float(program.evaluate(result.state, data.validation(_VALIDATION_BATCHES))["loss"])
        say(
            f"validation loss {final:.3f} nats a token; guessing by frequency alone (the unigram entropy of the text) "
            f"scores {data.unigram_entropy:.3f}"
        )
        if self.sample:
            text = self._sample_text(program, result.state, data)
            write_whole(folder / "sample.txt", text)
            say(f"a sample ({folder / 'sample.txt'}):\n\n{text}")
        return 0

    def _check(self) -> None:
        """Refuses numbers that make no sense before anything is built, and so before hours of training."""
        at_least = {
            "steps": 1, "batch": 1, "seq": 1, "warmup": 0, "seed": 0, "checkpoint_every": 1, "evaluate_every": 1,
            "log_every": 1, "sample": 0, "keep": 1, "patience": 1, "verify_copies_every": 1, "snapshot_every": 1,
        }  # fmt: skip
        if self.checkpoint_every == "auto":
            del at_least["checkpoint_every"]
        check_options(self, at_least)
        if self.profile is not None:
            steps_of(self.profile)
        if self.between_failures is not None and not 0 < self.between_failures < math.inf:
            raise ValueError(f"--between-failures {self.between_failures}: it is hours, above 0, such as 24")
        fine = {
            "learning_rate": (0 < self.learning_rate < math.inf, "above 0, such as 2e-3"),
            "weight_decay": (0 <= self.weight_decay < math.inf, "at least 0, such as 0.1"),
            "dropout": (0 <= self.dropout < 1, "a rate, at least 0 and below 1, such as 0.1"),
        }
        for name, (is_fine, needed) in fine.items():
            if not is_fine:
                raise ValueError(f"{flag(name)} {getattr(self, name)}: it is {needed}")
        if self.seed >= 2**32:
            raise ValueError(f"--seed {self.seed}: it is below 2**32, such as 0")

    def _folder(self) -> Path:
        if self.resume not in (None, _AUTO):
            return Path(self.resume)
        if self.folder is None and jax.process_count() > 1:
            raise ValueError("several processes must agree on the folder of the run: give --folder")
        return new_run(self.model) if self.folder is None else Path(self.folder)

    def _data(self) -> TextData:
        if self.vocabulary is None and self.data is not None and Path(self.data).suffix == ".bin":
            vocab_size = gpt(self.model).vocab_size
        else:
            vocab_size = None
        return text_data(
            self.data,
            batch_size=self.batch,
            sequence=self.seq,
            vocabulary=self.vocabulary,
            vocab_size=vocab_size,
            seed=self.seed,
        )

    def _writers(self, folder: Path) -> list[Writer]:
        made: dict[str, Callable[[], Writer]] = {
            "tensorboard": TensorBoard,
            "wandb": lambda: WandB("cjax", name=folder.name),
            "mlflow": lambda: MLflow("cjax", run_name=folder.name),
            "prometheus": lambda: Prometheus(folder / "metrics.prom", {"run": folder.name}),
        }
        return [made[name]() for name in dict.fromkeys(self.log)]

    def _callbacks(self) -> list[Callback]:
        found: list[Callback] = []
        if self.patience is not None:
            found.append(EarlyStop(patience=self.patience))
        if self.on_spike is not None:
            found.append(LossSpike(self.on_spike))
        if self.profile is not None:
            found.append(ProfileSteps(*steps_of(self.profile)))
        return found

    def _schedule(self) -> optax.Schedule:
        warmup = min(self.steps // 10, 1000) if self.warmup is None else self.warmup
        return optax.warmup_cosine_decay_schedule(
            0.0, self.learning_rate, warmup, max(self.steps, warmup + 1), self.learning_rate / 10
        )

    def _optimizer(self) -> optax.GradientTransformation:
        schedule, decay = self._schedule(), self.weight_decay
        match self.optimizer:
            case "adamw":
                rule = optax.adamw(schedule, b2=0.95, weight_decay=decay, mask=weights_only)
            case "lamb":
                rule = lamb(schedule, b2=0.95, weight_decay=decay)
            case "lars":
                rule = lars(schedule, weight_decay=decay)
            case "sgd":
                rule = optax.chain(optax.add_decayed_weights(decay, weights_only), optax.sgd(schedule, momentum=0.9))
        return optax.chain(optax.clip_by_global_norm(1.0), rule)

    @contextlib.contextmanager
    def _remembered(self, folder: Path) -> Iterator[None]:
        """Options beside the run. Those of one that is gone on with stay what they were where it can't be, under these:
        or the same command without them would do what has just been refused."""
        options, plan = folder / "options.json", folder / "plan.txt"  # which fit writes when it has a state
        before = options.read_text() if options.exists() else None
        began = plan.stat().st_mtime_ns if plan.exists() else None
        self._remember(folder)
        try:
            yield
        except BaseException:
            is_same = (plan.stat().st_mtime_ns if plan.exists() else None) == began
            if before is not None and is_same and jax.process_index() == 0:
                write_whole(options, before)
            raise

    def _remember(self, folder: Path) -> None:
        """Writes the options beside the run, so that its folder is all that a resume needs."""
        # By another run, which fit refuses; that of a job has its supervisor's lock.
        is_taken = (self.resume is None and (folder / "metrics.jsonl").exists()) or (
            member() is None and is_locked(folder)
        )
        if jax.process_index() == 0 and not is_taken:
            folder.mkdir(parents=True, exist_ok=True)
            options = dataclasses.asdict(self) | {"resume": None, "folder": None}
            for name in ("data", "vocabulary", "disk_folder"):
                if (place := getattr(self, name)) is not None:
                    options[name] = str(Path(place).absolute())
            write_whole(folder / "options.json", json.dumps(options, indent=1))

    def _sample_text(self, program: Program, state: State, data: TextData) -> str:
        text = data.held_out if len(data.held_out) else data.train
        prompt = np.asarray(text[: min(32, self.seq)], np.int32)[None]
        model = program.model(state)
        made = generate(model, jax.numpy.asarray(prompt), self.sample, jax.random.key(self.seed), temperature=0.8)
        return data.decode(np.asarray(made[0]))


def steps_of(text: str) -> tuple[int, int]:
    """The first and the last of the steps that were typed.

    >>> steps_of("10:12"), steps_of("7")
    ((10, 12), (7, 7))
    """
    first, _, last = text.partition(":")
    if not first.isdecimal() or not (last or first).isdecimal() or not 1 <= int(first) <= int(last or first):
        raise ValueError(f"--profile {text}: it is the first and the last of the steps to trace, such as 10:12")
    return int(first), int(last or first)


def _keep_compiled(folder: Path) -> None:
    """Programs that are compiled stay with the run, so that going on with it does not wait for them again."""
    if jax.config.values["jax_compilation_cache_dir"] is None:
        jax.config.update("jax_compilation_cache_dir", str(JobFolder(folder.absolute()).cache(jax.process_index())))
        each_process_writes_its_cache()


def _read_options(file: Path) -> Train:
    """The options of the run of `file`.

    Raises:
        ValueError: it holds something else.
    """
    known = [field.name for field in dataclasses.fields(Train)]
    try:
        found = json.loads(file.read_bytes())
        if not isinstance(found, dict):
            raise ValueError("it holds no options")
        if unknown := [name for name in found if name not in known]:
            raise ValueError(f"it holds options that are none: {', '.join(unknown)}")
        return Train(**{**found, "log": tuple(found.get("log", ()))})
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{file} is not what a run leaves of its options ({error}); start again with another --folder, or write "
            "{} into it for those that are usual"
        ) from error
