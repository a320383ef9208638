"""The vocabulary: every primitive that JAX registers is in it or left out of it for a reason, and tables keep to it."""

import functools
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive

from cjax.sharding.apart.faults import FAULTS
from cjax.sharding.apart.lanes import _LANES
from cjax.sharding.place.place import PINNED
from cjax.trace.attention.bounds import _RULES as BOUNDS
from cjax.trace.dims import refine_rules, rules
from cjax.trace.dims.tables import TELL_NEGATIVE
from cjax.trace.examples import arithmetic
from cjax.trace.examples import rules as example_rules
from cjax.trace.examples.verdict import _CONTROL
from cjax.trace.jaxpr import cost, fold
from cjax.trace.jaxpr.compared import COMPARED
from cjax.trace.jaxpr.covered import PRIMITIVES
from cjax.trace.jaxpr.primitives import (
    FACTS,
    WITHOUT,
    facts_of,
    goes_by_element,
    having,
    name_of,
    named,
    without_facts,
    word_for,
)
from cjax.trace.layers import grouping
from cjax.walk import through, unstack

# Where JAX makes its primitives, as far as a Flax model gets to them. Kernels in Pallas have a language of their own.
MODULES = (
    "jax.numpy jax.numpy.fft jax.numpy.linalg jax.scipy.linalg jax.scipy.special jax.scipy.stats jax.scipy.signal "
    "jax.random jax.lax jax.lax.linalg jax.nn jax.image jax.debug jax.ffi jax.export jax.experimental.shard_map "
    "jax.experimental.layout jax.experimental.multihost_utils jax.experimental.custom_partitioning "
    "jax.extend.random flax.linen flax.nnx optax"
)
# Functions by primitive: they may stay where they are, but their keys are words of the vocabulary.
TABLES: dict[str, Any] = {
    "dims": rules.RULES,
    "dims taken apart": refine_rules.RULES,
    "tables": TELL_NEGATIVE,
    "examples": example_rules.RULES,
    "examples, two operands": arithmetic._BINARY,
    "examples, constants": arithmetic._CONSTANT,
    "examples, control": _CONTROL,
    "bounds": BOUNDS,
    "folded": fold._DEFINED,
    "multiply-adds": cost._MULTIPLY_ADDS,
    "compared": COMPARED,
    "chains": grouping.CHAINED,
    "lanes": _LANES,
    "pinned": PINNED,
    "parts of results": through._RULES,
    "sizes of parts": through._SIZES,
    "sums over layers": unstack._TOGETHER,
    **{f"faults of {fault.name}": fault.primitives for fault in FAULTS},
}


WALK = """
import gc, importlib, sys
from jax.extend.core import Primitive
for module in sys.argv[1:]:
    importlib.import_module(module)
made = [each for each in gc.get_objects() if isinstance(each, Primitive)]
from cjax.jax_compat.jaxprs import is_of_jax
print(*{each.name for each in made})
print(*{each.name for each in made if not is_of_jax(each)})
"""


@functools.cache
def walked() -> tuple[set[str], set[str]]:
    """The names of all primitives that this JAX makes, wherever it keeps them, of a process that has no others; and of
    those that cjax does not take for JAX's."""
    command = [sys.executable, "-c", WALK, *MODULES.split()]
    said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout.split("\n")
    return set(said[0].split()), set(said[1].split())


def registered() -> set[str]:
    return walked()[0]


LEFT_OUT = {name for names in WITHOUT.values() for name in names.split()}


def test_every_primitive_of_this_jax_is_known_or_left_out_for_a_reason() -> None:
    new = sorted(registered() - FACTS.keys() - LEFT_OUT)
    assert not new, f"JAX {jax.__version__} brings {new}: give each its facts, or a reason in WITHOUT"


def test_every_word_is_believed_of_jaxs_own_primitive() -> None:
    """One that is not found where JAX keeps them would be computed whole everywhere, and every model slow."""
    assert not walked()[1] & FACTS.keys()


def test_the_vocabulary_has_no_word_that_no_jax_has() -> None:
    """Of names that this JAX lacks, another has to have each: those that the versions differ in are few."""
    of_one_version = set(
        """
        box_get box_set call closed_call core_map get_variable log_extend log_read new_box new_log new_variable
        set_variable all_gather_done all_gather_reduced_start all_gather_start all_to_all_done all_to_all_start
        pbroadcast_done pbroadcast_start psum_done psum_start unreduced_psum_start unreduced_reduce_scatter_start
        psum_invariant_start reduce_scatter_done reduce_scatter_start reduced_vary_cast_p vary_unreduced_cast_p
        all_gather_invariant ppermute_done ppermute_start
        log2 one_minus_square pbroadcast_dynamic polynomial reduced_vary_cast relayout unreduced_pmax unreduced_pmin
        vary_unreduced_cast program_order
        """.split()
    )
    assert (FACTS.keys() | LEFT_OUT) - registered() <= of_one_version


def test_nothing_is_known_and_left_out() -> None:
    assert not FACTS.keys() & LEFT_OUT
    assert sum(len(names.split()) for names in WITHOUT.values()) == len(LEFT_OUT)


@pytest.mark.parametrize("table", TABLES)
def test_tables_are_keyed_by_the_vocabulary(table: str) -> None:
    assert set(TABLES[table]) <= FACTS.keys()


def test_a_word_that_is_not_there_is_an_error() -> None:
    with pytest.raises(AssertionError, match="scatter_add"):
        named("gather scatter_add")
    with pytest.raises(AssertionError, match="no fact is called"):
        having("elementary")


def test_what_tests_have_run_is_known() -> None:
    assert frozenset().union(*PRIMITIVES.values()) <= FACTS.keys()


# -- facts hold --------------------------------------------------------------------------------------------------------
def equations(function: Any, *args: Any) -> list[Any]:
    return list(jax.make_jaxpr(function)(*args).jaxpr.eqns)


@pytest.mark.full
def test_facts_of_elements_hold() -> None:
    """Each elementwise function of one or two real operands that JAX has by that name: one element at a time is all."""
    x, tried = jnp.asarray([[0.3, 0.6, 0.2], [0.9, 0.4, 0.7]], jnp.float32), 0
    for name in sorted(having("elementwise")):
        function: Any = getattr(lax, name, None)
        for operands in ((x,), (x, x.T.reshape(2, 3))):
            try:
                closed = jax.make_jaxpr(function)(*operands)
            except Exception:  # other numbers of operands, or dtypes
                continue
            if [eqn.primitive.name for eqn in closed.jaxpr.eqns] != [name]:
                continue
            whole = np.asarray(function(*operands))
            for i, j in ((0, 2), (1, 0)):
                alone = np.asarray(function(*(each[i : i + 1, j : j + 1] for each in operands)))
                np.testing.assert_allclose(alone[0, 0], whole[i, j], rtol=1e-6)
            tried += 1
    assert tried > 50


def test_numpy_gives_the_same_numbers() -> None:
    ints, floats = np.asarray([-7, -3, 2, 9], np.int32), np.asarray([-7.5, -0.0, 2.25, np.inf], np.float32)
    bools, tried = np.asarray([True, False, True, False]), 0
    other = {"i": np.asarray([2, -2, 5, -4], np.int32), "f": np.asarray([0.5, 3.0, -2.0, 1.0], np.float32), "b": ~bools}
    for name in sorted(having("numpy") - {"add_any", "select_n", "clamp"}):
        function: Any = getattr(lax, {"and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor",
                                      "not": "bitwise_not"}.get(name, name))  # fmt: skip
        for x in (ints, floats, bools):
            for operands in ((x,), (x, other[x.dtype.kind])):
                try:
                    wanted = np.asarray(function(*operands))
                except (TypeError, ValueError):
                    continue
                same: Any = FACTS[name].numpy
                with np.errstate(all="ignore"):
                    np.testing.assert_array_equal(same(*operands), wanted, err_msg=name)
                tried += 1
    assert tried > 30
    cases = [ints, ints + 1, ints + 2]
    which = np.asarray([2, 0, 1, 1], np.int32)
    chosen: Any = FACTS["select_n"].numpy
    np.testing.assert_array_equal(chosen(which, *cases), lax.select_n(which, *map(jnp.asarray, cases)))
    clamped: Any = FACTS["clamp"].numpy
    for low, high in ((-3, 2), (3, 2)):  # of limits that contradict each other the upper one holds
        np.testing.assert_array_equal(clamped(low, ints, high), lax.clamp(np.int32(low), ints, np.int32(high)))


def test_bits_of_another_width_go_by_no_element() -> None:
    (same,) = equations(lambda x: lax.bitcast_convert_type(x, jnp.int32), jnp.ones((2, 3)))
    (narrower,) = equations(lambda x: lax.bitcast_convert_type(x, jnp.uint8), jnp.ones((2, 3)))
    assert goes_by_element(same) and not goes_by_element(narrower)


def test_a_primitive_of_a_users_own_has_no_facts() -> None:
    own = Primitive("test_doubled")
    own.def_abstract_eval(lambda x: x)
    (eqn,) = equations(own.bind, jnp.ones(3))
    assert without_facts(eqn) and not goes_by_element(eqn)
    assert all(not value for name, value in vars(facts_of(eqn)).items())


@pytest.mark.parametrize("word", ["sort", "add", "dot_general", "split"])
def test_a_users_own_that_has_the_name_of_one_of_jaxs_has_no_facts(word: str) -> None:
    own = Primitive(word)
    own.def_abstract_eval(lambda x: x)
    (eqn,) = equations(own.bind, jnp.ones(3))
    assert without_facts(eqn) and not goes_by_element(eqn) and name_of(eqn) == f"{word} (not JAX's)"
    assert not any(name_of(eqn) in table for table in TABLES.values())
    assert word_for(lax.add_p) == "add" and word_for(Primitive("test_added")) == "test_added"
