import json
import os
import re
import shutil
import signal
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from forked import Forks

from cjax import models
from cjax.checkpoint import inspect
from cjax.cli import main
from cjax.cli.train import Train

SMALL = ("--batch", "8", "--seq", "16", "--log-every", "1", "--checkpoint-every", "4", "--sample", "8")


@pytest.fixture(scope="module", autouse=True)
def small_model():
    """The same architecture in a size that compiles in a moment."""
    with pytest.MonkeyPatch.context() as patch:
        small = models.GPTConfig(num_layers=2, num_heads=4, embed_dim=32, context=64, vocab_size=256)
        patch.setitem(models.presets, "gpt-mini", small)
        yield


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog; " * 400)
    return path


def losses(folder: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def measured(folder: Path) -> dict[int, tuple[float, float]]:
    """Loss and norm of the gradients. Of weights that differ in their last bits most losses are the same, and of norms
    few."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: (line["loss"], line["grad_norm"]) for line in lines if "loss" in line}


@pytest.fixture(scope="module")
def whole(tmp_path_factory, text: Path) -> Path:
    """A run of twelve steps, uninterrupted."""
    folder = tmp_path_factory.mktemp("whole")
    more = ["--evaluate-every", "4", "--hardware", "--best", "--patience", "9", "--log", "prometheus"]
    assert main(["train", "--data", str(text), "--steps", "12", "--folder", str(folder), *SMALL, *more]) == 0
    return folder


@pytest.mark.full
def test_a_run_leaves_all_that_it_promises(whole: Path):
    more = ("metrics.prom", "system.jsonl", "report.html")
    for name in ("metrics.jsonl", "plan.txt", "report.txt", "options.json", "sample.txt", *more):
        assert (whole / name).stat().st_size > 0, name
    assert (whole / "plan.txt").read_text().strip() == "data=4 tensor=2 zero=1"
    assert len(losses(whole)) == 12 and losses(whole)[12] < losses(whole)[1] - 0.2
    summary = inspect(whole)
    assert (summary.step, summary.plan) == (12, "data=4 tensor=2 zero=1")
    assert summary.arrays["params/blocks/1/mlp/up/kernel"].shape == (32, 128)
    assert summary.meta["data"]["samples"] == 96
    lines = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    rates = [line["learning_rate"] for line in lines if "loss" in line]
    assert rates[:2] == pytest.approx([0.0, 2e-3]) and rates[-1] == pytest.approx(2.365e-4, rel=1e-3)
    assert all(line["tokens/s"] == pytest.approx(16 * line["samples/s"]) for line in lines if "tokens/s" in line)
    scores = {line["step"]: line["validation_loss"] for line in lines if "validation_loss" in line}
    assert inspect(whole / "best").step == min(scores, key=lambda step: scores[step])
    assert json.loads((whole / "options.json").read_text())["log"] == ["prometheus"]


@pytest.mark.full
@pytest.mark.parametrize(
    "plan, tolerance", [(None, 0.0), pytest.param("tensor=4 zero=3", 1e-4, marks=pytest.mark.full)]
)
def test_it_resumes_under_the_same_plan_and_under_another(
    whole: Path, text: Path, tmp_path: Path, plan: str | None, tolerance: float, monkeypatch
):
    """The run is stopped by what a terminal sends, and continued from its folder alone."""
    step = 0

    def interrupt_at_six(self, num_processes: int, step_seconds: float):
        nonlocal step
        step += 1
        return signal.SIGINT if step == 7 else None

    with monkeypatch.context() as patch:
        patch.setattr("cjax.train.signals.StopRequest.agreed", interrupt_at_six)
        twelve = ["--data", str(text), "--steps", "12", "--folder", str(tmp_path), *SMALL, "--sample", "0"]
        status = main(["train", *twelve])
    assert status == 130 and inspect(tmp_path).step == 6
    more = ["--plan", plan] if plan else []
    assert main(["train", "--resume", str(tmp_path), *more]) == 0
    assert losses(tmp_path).keys() == losses(whole).keys()
    for number, loss in losses(whole).items():
        assert losses(tmp_path)[number] == pytest.approx(loss, abs=tolerance, rel=0)


KILLED = """
import os, signal, sys
from cjax import models
from cjax.cli import main
from cjax.walk.files import Folder

models.presets["gpt-mini"] = models.GPTConfig(num_layers=2, num_heads=4, embed_dim=32, context=64, vocab_size=256)
commit, calls = Folder.commit, 0


def killed(*args):
    global calls
    calls += 1
    if calls == 7:  # the first is before any step
        os.kill(os.getpid(), signal.SIGKILL)
    commit(*args)


Folder.commit = killed
main(["train", *sys.argv[1:]])
"""


@pytest.mark.full
def test_a_run_on_disk_that_is_killed_before_its_first_checkpoint_goes_on(
    text: Path, tmp_path: Path, forks: Forks, capsys, monkeypatch
):
    monkeypatch.delenv("CJAX_TRACEBACK", raising=False)
    whole, cut = tmp_path / "whole", tmp_path / "cut"

    def arguments(folder: Path) -> list[str]:
        plan = "zero=1 offload=params+optimizer+gradients host=0B disk=40MB"
        disk = ["--plan", plan, "--disk-folder", f"{folder}-rows"]
        every = ["--checkpoint-every", "10", "--sample", "0"]
        return ["--data", str(text), "--steps", "12", "--folder", str(folder), *SMALL, *disk, *every]

    assert main(["train", *arguments(whole)]) == 0
    assert forks.run(["-c", KILLED, *arguments(cut)], os.environ).returncode == -signal.SIGKILL
    assert not list((cut / "checkpoints").glob("*"))
    capsys.readouterr()
    other = [str(tmp_path / "other") if x == str(cut) else x for x in arguments(cut)]
    assert main(["train", *other]) == 1
    assert f"after step 5: go on with cjax train --resume {cut}, or remove" in " ".join(capsys.readouterr().err.split())
    assert main(["train", "--resume", str(whole), "--disk-folder", f"{cut}-rows"]) == 1
    assert f"holds the run of {cut} after step 5" in " ".join(capsys.readouterr().err.split())
    assert json.loads((whole / "options.json").read_text())["disk_folder"] == f"{whole}-rows", "as it was"
    as_it_was = f"as they were, cjax train --resume {cut}"
    for more, said in (
        (("--optimizer", "sgd"), f"this run after step 5, and began with another optimizer, .* {as_it_was}; or begin"),
        (("--plan", "zero=1"), f"this run after step 5, under plan .*{as_it_was}, and interrupt that"),
        (("--learning-rate", "1e-3"), f"this run after step 5, whose update .*{as_it_was}, and interrupt that"),
    ):
        assert main(["train", "--resume", str(cut), *more]) == 1
        assert re.search(said, " ".join(capsys.readouterr().err.split())), more
    assert main(["train", "--resume", str(cut)]) == 0
    # The line of a step is written while the next is under way.
    assert measured(cut) == {step: values for step, values in measured(whole).items() if step != 5}
    assert inspect(cut).meta["data"]["samples"] == 96
    shutil.rmtree(cut / "checkpoints")  # as of one that was killed behind its last step
    assert main(["train", "--resume", str(cut)]) == 0
    assert inspect(cut).step == 12


def test_the_options_of_a_run_are_those_of_its_resume_unless_typed_again(whole: Path):
    options = Train.parse(["--resume", str(whole), "--steps", "20"])
    assert (options.steps, options.batch, options.seq, options.sample) == (20, 8, 16, 8)
    assert options.data is not None and Path(options.data).is_absolute()


def test_options_of_a_run_that_cannot_be_gone_on_with_stay_what_they_were(tmp_path: Path):
    kept, plan = tmp_path / "options.json", tmp_path / "plan.txt"
    Train(steps=10)._remember(tmp_path)
    before = kept.read_text()
    plan.write_text("data=8")
    with pytest.raises(KeyError), Train(steps=20, resume=str(tmp_path))._remembered(tmp_path):
        assert json.loads(kept.read_text())["steps"] == 20
        raise KeyError  # as a plan that is refused would
    assert kept.read_text() == before
    with pytest.raises(KeyError), Train(steps=20, resume=str(tmp_path))._remembered(tmp_path):
        os.utime(plan, ns=(1, 1))  # it has a state, and begins
        raise KeyError
    assert json.loads(kept.read_text())["steps"] == 20


def test_what_was_named_from_where_one_stood_is_found_from_elsewhere(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = Train(data="text", vocabulary="words", disk_folder="rows")
    options._remember(tmp_path / "run")
    kept = json.loads((tmp_path / "run" / "options.json").read_text())
    assert [kept[name] for name in ("data", "vocabulary", "disk_folder")] == [
        str(tmp_path / name) for name in ("text", "words", "rows")
    ]
    assert kept["folder"] is None and kept["resume"] is None


def test_a_run_of_fit_is_resumed_by_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "checkpoints" / "5").mkdir(parents=True)
    assert main(["train", "--resume", str(tmp_path)]) == 1
    assert f"fit(..., folder={str(tmp_path)!r}, resume=True)" in capsys.readouterr().err


@pytest.mark.full("arguments0-the names are gpt-mini")
@pytest.mark.parametrize(
    "arguments, message",
    [
        (["gpt5"], "the names are gpt-mini"),
        (["--data", "nowhere.txt"], "no file or folder nowhere.txt"),
        (["--devices", "h100:8"], "cjax plan --target h100:8"),
        (["--plan", "tensro=2"], "tensor"),
        (["--plan", "tensor=3"], "3"),
        (["--seq", "300"], "context of 64"),
        (
            ["--resume", "nowhere"],
            "nowhere is not the folder of a run of cjax train: .*json$",
        ),
        (["--batch", "10000000"], "Take a smaller batch"),
        (["--learning-rate", "-1"], "--learning-rate -1.0: it is above 0"),
        (["--learning-rate", "nan"], "--learning-rate nan: it is above 0"),
        (["--learning-rate", "0"], "--learning-rate 0.0: it is above 0"),
        (["--weight-decay", "-0.1"], "--weight-decay -0.1: it is at least 0"),
        (["--dropout", "1"], "--dropout 1.0: it is a rate"),
        (["--checkpoint-every", "0"], "--checkpoint-every 0: it is a whole number, at least 1"),
        (["--evaluate-every", "-2"], "--evaluate-every -2: it is"),
        (["--log-every", "0"], "--log-every 0: it is"),
        (["--sample", "-3"], "--sample -3: it is a whole number, at least 0"),
        (["--steps", "0"], "--steps 0: it is"),
        (["--seq", "0"], "--seq 0: it is"),
        (["--warmup", "-1"], "--warmup -1: it is"),
        (["--seed", "-1"], "--seed -1: it is"),
        (["--patience", "0"], "--patience 0: it is"),
        (["--profile", "9:3"], "--profile 9:3: it is the first and the last"),
        (["--between-failures", "0"], "--between-failures 0.0: it is hours"),
        (["--seed", "4294967296"], "--seed 4294967296: it is below"),
    ],
)
def test_mistakes_end_in_one_message(arguments: list[str], message: str, tmp_path: Path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CJAX_TRACEBACK", raising=False)
    assert main(["train", *arguments]) == 1
    assert re.search(message, capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == [], "a refused run leaves nothing behind"


def test_a_folder_with_a_run_is_refused_and_left_alone(whole: Path, text: Path, capsys):
    before = {path.name: path.read_bytes() for path in whole.iterdir() if path.is_file()}
    assert main(["train", "--data", str(text), "--steps", "1", "--folder", str(whole), *SMALL]) == 1
    assert "holds a run already" in capsys.readouterr().err
    assert before == {path.name: path.read_bytes() for path in whole.iterdir() if path.is_file()}


@pytest.mark.parametrize("name", ["adamw", "lamb", "lars", "sgd"])
def test_an_optimizer_is_chosen_by_name(name: str):
    """Kernels are decayed and biases not, whatever the optimizer; the schedule begins at zero."""
    options = ("--optimizer", name, "--weight-decay", "0.5", "--steps", "20", "--warmup", "1")
    optimizer = Train.parse(options)._optimizer()
    params = {"kernel": jnp.ones((3, 2)), "bias": jnp.ones(2)}
    state, nothing = optimizer.init(params), jax.tree.map(jnp.zeros_like, params)
    updates, state = optimizer.update(nothing, state, params)
    assert all((u == 0).all() for u in jax.tree.leaves(updates))
    updates, _ = optimizer.update(nothing, state, params)
    assert (updates["kernel"] < 0).all() and (updates["bias"] == 0).all()


@pytest.mark.parametrize("content", ["[" * 100_000, "[]", '{"step": 3}', '{"batch": ', "\x00"], ids=range(5))
def test_options_of_a_run_that_are_none_are_named(content: str, tmp_path: Path, capsys, monkeypatch):
    monkeypatch.delenv("CJAX_TRACEBACK", raising=False)
    (tmp_path / "options.json").write_text(content)
    assert main(["train", "--resume", str(tmp_path)]) == 1
    assert "options.json is not what a run leaves of its options" in capsys.readouterr().err


@pytest.mark.full
def test_auto_begins_a_run_and_goes_on_with_it(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    arguments = ["--data", str(text), "--folder", str(tmp_path / "run"), "--resume", "auto", "--sample", "0", *SMALL]
    assert main(["train", *arguments, "--steps", "4"]) == 0
    assert inspect(tmp_path / "run").step == 4
    capsys.readouterr()
    assert main(["train", *arguments, "--steps", "6"]) == 0
    assert "resuming after step 4" in capsys.readouterr().err and inspect(tmp_path / "run").step == 6
    assert main(["train", "--resume", "auto"]) == 1
    assert "give --folder" in capsys.readouterr().err
