import re
from pathlib import Path

import jax
import pytest

import cjax
from cjax import models
from cjax.cli import main
from cjax.cli.built_in import built_in

USER_FILE = """
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from beside import WIDTH


class Net(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, 32, rngs=rngs)
        self.down = nnx.Linear(32, 1, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def loss(model, batch):
    return jnp.mean(model(batch["x"]) ** 2)


def make():
    return lambda rngs: Net(rngs), loss, optax.adam(1e-3), {"x": jax.ShapeDtypeStruct((8, WIDTH), "float32")}


def wrong():
    return 1, 2


def fails():
    raise KeyError("width")


def fails_later():
    def loss(model, batch):
        return jnp.mean(model(batch["x"]) @ jnp.ones((3, 3)))

    return (make()[0], loss, *make()[2:])
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "net.py").write_text(USER_FILE)
    (tmp_path / "beside.py").write_text("WIDTH = 16\n")
    return str(tmp_path / "net.py")


def test_plans_for_a_model_of_the_users_own(file: str, capsys):
    plans = ["--plan", "tensor=2", "--plan", "zero=3", "--plan", "tensor=3"]
    assert main(["plan", f"{file}:make", "--target", "cpu:8", *plans]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert any(row.startswith("tensor=2") for row in rows)
    assert any(row.startswith("zero=3") for row in rows)
    (refused,) = [row for row in rows if row.startswith("tensor=3")]
    assert "8" in refused, "a refused plan is a row with its reason"


def test_plans_of_which_none_can_be_had_are_a_failure(file: str, capsys):
    assert main(["plan", f"{file}:make", "--target", "cpu:8", "--plan", "data=3", "--plan", "tensor=3"]) == 1
    said = capsys.readouterr().out
    assert "data=3" in said and "tensor=3" in said


@pytest.mark.full
def test_one_plan_is_reported_in_full(capsys, monkeypatch):
    small = models.GPTConfig(num_layers=2, num_heads=4, embed_dim=32, context=64, vocab_size=256)
    monkeypatch.setitem(models.presets, "gpt-mini", small)
    arguments = ["gpt-mini", "--target", "cpu:8", "--plan", "tensor=2 zero=1", "--seq", "32"]
    assert main(["plan", *arguments]) == 0
    text = capsys.readouterr().out
    assert "plan    data=4 tensor=2 zero=1" in text and "mlp/up/kernel" in text


def test_a_search_needs_no_devices_and_compiles_nothing(capsys, monkeypatch):
    def nobody(*args, **options):
        raise AssertionError("a search compiles nothing")

    monkeypatch.setattr("cjax.program.plans.resolve_devices", nobody)
    monkeypatch.setattr("jax.stages.Lowered.compile", nobody)
    small = models.GPTConfig(num_layers=4, num_heads=4, embed_dim=64, context=64, vocab_size=256)
    monkeypatch.setitem(models.presets, "gpt-mini", small)
    arguments = ["gpt-mini", "--target", "v100:16/price=2", "--search", "--batch", "64", "--top", "3", "--explain"]
    assert main(["plan", *arguments, "--plan", "auto precision=float16", "--objective", "cost"]) == 0
    text = capsys.readouterr().out
    assert "gpt-mini on v100:16/price=2" in text and "least cost first" in text and text.count("precision=float16") > 3
    assert "what it costs" in text and "fastest" in text


@pytest.mark.full
def test_room_beside_the_devices_is_answered_by_arithmetic(capsys, monkeypatch):
    def nobody(*args, **options):
        raise AssertionError("nothing is compiled")

    monkeypatch.setattr("jax.stages.Lowered.compile", nobody)
    room = ["--host", "1GiB", "--disk", "4GiB", "--budget", "64MiB", "--plan", "auto precision=bfloat16", "--top", "2"]
    assert main(["plan", "gpt-mini", "--target", "h100:8", "--seq", "64", *room]) == 0
    text = capsys.readouterr().out
    assert "gpt-mini on h100:8" in text and "budget=64MiB host=1GiB disk=4GiB" in text
    assert text.count("precision=bfloat16") >= 2 and "bound" in text


@pytest.mark.parametrize("name", ["llama-mini", "bert-mini", "t5-mini", "vit-mini"])
def test_models_of_all_families_have_names(name: str):
    model, loss, optimizer, batch = built_in(name, 4, None if "vit" in name else 16)
    program = cjax.parallelize(model, loss, optimizer, batch, "data=2", devices=jax.devices()[:2])
    assert program.plan.data == 2 and {leaf.shape[0] for leaf in jax.tree.leaves(batch)} == {4}


@pytest.mark.full("arguments16-no plan fits memory; on 1 devices the leanest")
@pytest.mark.parametrize(
    "arguments, message",
    [
        (["gpt-mini", "--target", "h1000:8"], "no card is called 'h1000'.*did you mean h100"),
        (["gpt9"], "no model is called 'gpt9'; did you mean gpt2"),
        (
            ["vit-l16", "--seq", "8", "--target", "cpu:8"],
            "--seq is for models of text, and vit-l16 reads images",
        ),
        (["minilm-l6", "--target", "cpu:8"], "minilm-l6 has no words to predict"),
        (["gpt-mini", "--objective", "cost"], "--objective goes with --search"),
        (["gpt-mini", "--top", "3", "--price", "2"], "--price, --top go with --search"),
        (
            ["gpt-mini", "--search", "--objective", "speed"],
            "time, memory, cost, energy, not 'speed'",
        ),
        (["gpt-mini", "--search", "--plan", "data=8"], '--search takes one --plan: "auto", and behind it'),
        (["gpt-mini", "--search", "--host", "1TiB"], "--host looks for plans by itself; leave out --search"),
        (["gpt-mini", "--host", "1TiB", "--disk", "4T"], r"disk=4T has the unit 'T'.*write disk=4TiB"),
        (["gpt-mini", "--budget", "1GiB", "--verify", "2"], "--verify does not go with --budget, --host and --disk"),
        (["gpt-mini", "--budget", "1GiB", "--plan", "zero=1", "--plan", "zero=3"], "--budget takes one --plan"),
        (["FILE:make", "--target", "h100:2", "--budget", "1GiB"], "no layers that repeat were found"),
        (["gpt-mini", "--search", "--top", "0"], "--top 0: it is a whole number, at least 1"),
        (["gpt-mini", "--search", "--price", "-1"], "price=-1.0: it is dollars for an hour"),
        (
            [
                "gpt-mini",
                "--search",
                "--target",
                "h100:8",
                "--batch",
                "7",
                "--plan",
                "auto data=8",
            ],
            "no plan shares 7 rows over 8 devices",
        ),
        (
            ["gpt-mini", "--search", "--target", "h100:1/memory=1.51GiB", "--batch", "8"],
            "no plan fits memory; on 1 devices the leanest",
        ),
        (["nowhere.py:make", "--target", "cpu:8"], "no Python file nowhere.py"),
        (["FILE:nothing", "--target", "cpu:8"], "has no function nothing"),
        (["FILE:wrong", "--target", "cpu:8"], r"returned a tuple of 2; it should return \(model, loss"),
        (["FILE:make", "--target", "cpu:8", "--batch", "3"], "yours brings its own batch"),
        (["gpt-mini", "--target", "cpu:8", "--batch", "0"], "--batch 0: it is a whole number, at least 1"),
        (["gpt-mini", "--target", "cpu:8", "--seq", "-3"], "--seq -3: it is"),
        (["gpt-mini", "--target", "cpu:0"], "cpu:0 is no device at all; write cpu:8"),
        (["gpt-mini", "--target", "cpu"], "named with their number alone"),
        (["gpt-mini", "--target", "h100"], "h100 says no number of cards; write h100:8"),
        (["gpt-mini", "--target", "h100:8/node=3"], "or h100:9.*node=2\n *h100:8/node=3\n *\\^{6}\n"),
        (["gpt-mini", "--target", "v100:8"], "nothing compiles for Tesla V100-SXM2-32GB"),
        (["FILE:fails", "--target", "cpu:8"], 'net.py", line 31, in fails\n    raise KeyError.*\nKeyError: .width'),
        (["FILE:fails_later", "--target", "cpu:8"], r'net.py", line 36, in loss\n    return (?s:.*)\n\w*Error: '),
    ],
)
def test_what_cannot_be_planned_is_refused(file: str, capsys, arguments: list[str], message: str, monkeypatch):
    monkeypatch.delenv("CJAX_TRACEBACK", raising=False)
    assert main(["plan", *(argument.replace("FILE", file) for argument in arguments)]) == 1
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize(("line", "said"), [("def make(:", "line 2"), ("import not_there", "line 2, in <module>")])
def test_a_file_that_cannot_be_imported_shows_where(line: str, said: str, tmp_path: Path, capsys, monkeypatch):
    monkeypatch.delenv("CJAX_TRACEBACK", raising=False)
    (tmp_path / "broken.py").write_text(f"\n{line}\n")
    assert main(["plan", f"{tmp_path}/broken.py:make", "--target", "cpu:8"]) == 1
    text = capsys.readouterr().err
    assert f'broken.py", {said}' in text and line in text
