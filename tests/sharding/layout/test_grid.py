"""Which axes of a grid split what, in models whose right answer is known."""

import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract import trace_of
from flax import nnx
from forked import Forks
from jax.sharding import PartitionSpec as P
from starts import begin

import cjax
from cjax.models.gpt import GPT, gpt, loss
from cjax.plan import Plan
from cjax.sharding.layout.grid import Operand, grid_of, spread_of, weight_entries
from cjax.sharding.layout.layout import Layout, make_layout
from cjax.sharding.products.matmul import Move
from cjax.trace.author.capture import capture
from cjax.trace.reading import Trace
from cjax.trace.source import TraceSource

MODES = ("2d:4", "2.5d:8/2", "3d:8")


def layout_of(trace: Trace, tensor: str, rules: Any = None) -> Layout:
    plan = Plan.parse(f"tensor={tensor}")
    return make_layout(trace, plan.resolve(plan.tensor.size).axis_sizes(), rules or {})


def specs(trace: Trace, tensor: str) -> dict[str, list[Any]]:
    layout = layout_of(trace, tensor)
    leaves = [(i, leaf) for i, leaf in enumerate(trace.leaves) if leaf.kind == "params"]
    return {leaf.name: [*layout.weight_spec(i, trace.classes_of(i), leaf.shape)] for i, leaf in leaves}


def features(trace: Trace, tensor: str) -> dict[str, tuple[str, ...]]:
    """Axes of the dims that are split, by name."""
    return {trace.names.get(c, "?"): axes for c, axes in layout_of(trace, tensor).axes_of.items()}


def trace_model(build: Callable[[nnx.Rngs], nnx.Module], *shape: int) -> Trace:
    batch = jax.ShapeDtypeStruct(shape, jnp.float32)
    return TraceSource(capture(build, squares, batch), batch).read()


def squares(model: Any, x: jax.Array) -> jax.Array:
    return (model(x) ** 2).mean()


def gpt_trace(batch: int = 8, **sizes: int) -> Trace:
    config = gpt("gpt-mini", **sizes)
    shapes = {name: jax.ShapeDtypeStruct((batch, 16), jnp.int32) for name in ("inputs", "targets")}
    return TraceSource(capture(lambda rngs: GPT(config, rngs=rngs), loss, shapes), shapes).read()


# -- axes -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("tensor", ["2d:4", "2.5d:8/2", "2.5d:4", "3d:27"])
def test_a_grid_is_found_among_the_axes_and_named_as_the_plan_has_it(tensor: str) -> None:
    grid = grid_of({"data": 2, **Plan.parse(f"tensor={tensor}").tensor.axis_sizes()})
    assert grid is not None and grid.mode == tensor


def test_there_is_no_grid_without_its_axes() -> None:
    assert grid_of({"data": 4, "tensor": 2}) is None
    assert grid_of({"data": 4, "row": 1, "col": 1}) is None


@pytest.mark.parametrize("tensor", ["2d:4", "2.5d:8/2"])
def test_2d_has_all_features_on_one_axis(tensor: str) -> None:
    found = features(gpt_trace(), tensor)
    assert {found[name] for name in ("embed", "heads", "ffn", "vocab")} == {("col",)}
    assert found["batch"] == (("row",) if tensor == "2d:4" else ("depth", "row"))


def test_3d_has_two_colours_and_every_matmul_leads_from_one_to_the_other() -> None:
    trace = gpt_trace()
    found = features(trace, "3d:8")
    assert found["embed"] == ("k",) and {found[name] for name in ("heads", "ffn", "vocab")} == {("j",)}
    assert found["batch"] == ("i", "j")
    layout, shape = layout_of(trace, "3d:8"), (8, 16, 512)
    names = {name: c for c, name in trace.names.items()}
    stream, hidden = ([names["batch"], -1, names[name]] for name in ("embed", "ffn"))
    assert layout.spec(stream, shape) == P(("i", "j"), None, "k")
    assert layout.spec(hidden, shape) == P(("i", "k"), None, "j"), "the batch takes the axis that features leave"


# -- graphs that two colours don't fit --------------------------------------------------------------------------------
class Chain(nnx.Module):
    """Linear layers, with what `close` says added back."""

    def __init__(self, widths: tuple[int, ...], close: bool, *, rngs: nnx.Rngs):
        pairs = zip(widths[:-1], widths[1:], strict=True)
        self.layers = nnx.List([nnx.Linear(i, o, use_bias=False, rngs=rngs) for i, o in pairs])
        self.close = close

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.layers[0](x)
        z = y
        for layer in self.layers[1:]:
            z = jnp.tanh(layer(z))
        return y + z if self.close else z


def colours(trace: Trace) -> list[list[Any]]:
    return [*specs(trace, "3d:8").values()]


def test_colours_alternate_along_a_chain() -> None:
    trace = trace_model(lambda rngs: Chain((12, 20, 28, 36, 44), False, rngs=rngs), 8, 12)
    kernels = colours(trace)
    made = [spec[1] for spec in kernels]
    summed = [spec[0][0] for spec in kernels]
    assert summed[1:] == made[:-1], "each takes features from where the last has put them"
    assert all({a, b} == {"j", "k"} for a, b in zip(summed, made, strict=True))


ODD = (12, 20, 28, 36, 20)  # back to a width of its own after three layers


@pytest.mark.parametrize("tensor", MODES)
def test_an_odd_cycle_is_computed_all_the_same(tensor: str) -> None:
    """Three layers lead from a width back to it: in 3d one of them can't lead from colour to colour."""
    program = cjax.parallelize(
        lambda rngs: Chain(ODD, True, rngs=rngs), squares, None, np.ones((8, 12), "float32"), f"tensor={tensor}"
    )
    x = np.random.default_rng(0).standard_normal((8, 12), dtype="float32")
    assert program.check(begin(program), x).is_close


def test_an_odd_cycle_leaves_its_lightest_layer_to_the_compiler() -> None:
    trace = trace_model(lambda rngs: Chain(ODD, True, rngs=rngs), 8, 12)
    names = {leaf.name: trace.classes_of(i) for i, leaf in enumerate(trace.leaves) if leaf.kind == "params"}
    axes = layout_of(trace, "3d:8").axes_of
    same = [name for name, (a, b) in names.items() if axes[a] == axes[b]]
    assert same == ["layers/1/kernel"], "20 to 28; 28 to 36 and 36 to 20 are heavier"


# -- what is left to others -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("tensor", MODES)
def test_of_classes_that_meet_in_one_activation_one_is_split(tensor: str) -> None:
    """An MLP-mixer's patches and channels: it multiplies along both."""
    found = specs(trace_of("linen_mixer"), tensor)
    feature = "k" if tensor == "3d:8" else "col"
    assert found["patches/kernel"] == [None, None, None, feature]
    tokens, channels = found["Dense_0/kernel"], found["Dense_10/kernel"]
    assert tokens == [None, None], "[patches, hidden]"
    assert all(channels), "[hidden, embed]"


@pytest.mark.parametrize("tensor", MODES)
def test_a_recurrent_model_is_split_as_in_1d_where_it_can(tensor: str) -> None:
    trace = trace_of("linen_lstm")
    axis = "k" if tensor == "3d:8" else "col"
    notes = layout_of(trace, tensor).notes
    assert any(note.endswith(f"split as in 1d over {axis}: no matmul of {tensor}") for note in notes)
    found = specs(trace, tensor)
    assert found["Dense_0/kernel"] == [None, axis]
    assert found["OptimizedLSTMCell_0/hf/kernel"] == found["OptimizedLSTMCell_0/if/kernel"] == [axis, None]
    assert found["OptimizedLSTMCell_1/hf/kernel"] == [None, None], "its state is what the classifier sums over"
    assert any("% of the parameters' bytes whole" in note and "LSTM" in note for note in notes)


@pytest.mark.parametrize("tensor", MODES)
def test_a_model_that_nothing_splits_says_so(tensor: str) -> None:
    trace = trace_model(lambda rngs: nnx.Linear(1, 1, rngs=rngs), 8, 1)
    note = f"tensor={tensor} splits nothing in this model: every device of the axis does the same work"
    assert layout_of(trace, tensor).notes == (note,)


# -- parts of a transformer -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("tensor", "embedding", "head"),
    [("2d:4", ["row", "col"], ["row", "col"]), ("3d:8", ["i", "k"], [("k", "i"), "j"])],
)
def test_a_table_is_split_by_its_rows_and_features(tensor: str, embedding: list[Any], head: list[Any]) -> None:
    found = specs(trace_of("nnx_decoder"), tensor)
    assert found["embed/embedding"] == embedding, "[vocab, embed], gathered along the vocabulary"
    assert found["head/kernel"] == head, "[embed, vocab]"
    assert found["positions"] == [None, embedding[1]], "no token asks for them"


@pytest.mark.parametrize(("tensor", "tied"), [("2d:4", ["col", "row"]), ("3d:8", ["j", ("k", "i")])])
@pytest.mark.parametrize("name", ["linen_tied", "nnx_scan"])
def test_a_tied_table_lies_as_the_classifier_multiplies_it(name: str, tensor: str, tied: list[Any]) -> None:
    found = specs(trace_of(name), tensor)
    assert next(spec for path, spec in found.items() if "embedding" in path and "position" not in path) == tied


@pytest.mark.parametrize(("tensor", "parts"), [("2d:4", ["row", None, "col"]), ("3d:8", [("k", "i"), None, "j"])])
def test_packed_projections_are_split_by_heads(tensor: str, parts: list[Any]) -> None:
    found = specs(trace_of("linen_packed_qkv"), tensor)
    assert found["qkv_0/kernel"] == parts, "[embed, q k v, heads]"
    assert found["qkv_0/bias"] == parts[1:]


def test_key_value_heads_fewer_than_the_axis_stay_whole() -> None:
    trace = trace_of("nnx_llama")
    found = specs(trace, "2d:16")
    assert found["blocks/0/query"] == ["row", "col", None]
    assert found["blocks/0/key"][1:] == found["blocks/0/value"][1:] == [None, None]
    assert specs(trace, "2d:4")["blocks/0/key"] == ["row", "col", None]


@pytest.mark.full
def test_key_value_heads_fewer_than_the_axis_on_sixteen_devices(forks: Forks) -> None:
    """The whole model, against one device: a grid of 4 x 4, of which two share a key-value head."""
    code = (
        "import cjax; cjax.simulate(16); from zoo import MODELS\n"
        "model, loss, batch = MODELS['nnx_llama'].make()\n"
        "program = cjax.parallelize(model, loss, None, batch, 'tensor=2d:16')\n"
        "found = program.check(program.init(0), batch); assert found.is_close, found"
    )
    done = forks.run(["-c", code], os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"})
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("heads", "tensor", "works"),
    [
        (6, "2d:16", "1, 2d:4, 2d:9, 2d:36"),
        (6, "2.5d:32/2", "1, 2.5d:8/2, 2.5d:18/2, 2.5d:72/2"),
        (6, "3d:64", "1, 3d:8, 3d:27, 3d:216"),
        (3, "2d:4", "1, 2d:9"),
    ],
)
def test_heads_that_do_not_divide_are_refused_with_sizes_that_do(heads: int, tensor: str, works: str) -> None:
    said = rf"^tensor={tensor} can't split heads: this model has {heads}\. .*: {works}\.$"
    with pytest.raises(ValueError, match=said):
        layout_of(gpt_trace(batch=64, num_heads=heads), tensor)


def test_rules_win_over_the_grid() -> None:
    trace = gpt_trace()
    layout = layout_of(trace, "2d:4", {"ffn": None})
    found = {leaf.name: layout.weight_spec(i, trace.classes_of(i), leaf.shape) for i, leaf in enumerate(trace.leaves)}
    assert [*found["blocks/0/mlp/up/kernel"]] == ["col", None], "[embed, ffn]"
    assert [*found["blocks/0/attention/query/kernel"]][:2] == ["row", "col"]


# -- one weight -------------------------------------------------------------------------------------------------------
def entries(tensor: str, shape: tuple[int, ...], contracted: tuple[int, ...] = (0,)) -> Any:
    grid = grid_of(Plan.parse(f"tensor={tensor}").tensor.axis_sizes())
    assert grid is not None
    return weight_entries(grid, {0: (grid.features[0],), 1: (grid.features[-1],)}, (0, 1), shape, contracted)


def test_a_weight_is_split_once_more_along_what_divides() -> None:
    assert entries("2d:4", (6, 10)) == [("row",), ("col",)]
    assert entries("2d:4", (7, 8)) == [(), ("col", "row")], "rows divide by nothing, columns by four"
    assert entries("2d:4", (101, 6)) == [("row",), ("col",)], "neither divides: rows are many, and padded"
    assert entries("2d:4", (7, 6)) == [(), ("col",)], "too few to be worth it"
    assert entries("3d:8", (8, 6)) == [("k", "i"), ("j",)]
    assert entries("3d:8", (8, 12), contracted=(1,)) == [("k",), ("j", "i")], "the other way: from j to k"
    assert entries("2d:4", (1, 6)) is None, "a side too small to split: no product of the grid"


def test_a_product_needs_the_batch_and_its_features_where_they_belong() -> None:
    grid = grid_of({"row": 2, "col": 2})
    assert grid is not None
    axes, w = {0: ("col",), 1: ("col",)}, Operand(P(), (0, 1), (6, 10))

    def spread(spec: P, classes: tuple[int, ...], shape: tuple[int, ...], at: int) -> Any:
        return spread_of(grid, axes, 9, Operand(spec, classes, shape), w, ((at,), (0,)))

    found = spread(P("row", None, "col"), (9, 8, 0), (4, 3, 6), 2)
    assert (found.gather_x, found.gather_w) == (Move("col", 2), Move("row", 0))
    assert found.y == P(("row",), None, ("col",))
    assert spread(P(None, "col"), (8, 0), (4, 6), 1) is None, "no batch: the gradient of a weight, or a table's"
    assert spread(P("row", None), (9, 0), (4, 6), 1) is None, "features elsewhere"
