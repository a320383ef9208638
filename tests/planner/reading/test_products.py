"""Products by the names of their dims: rows of activations, what is summed over, features that a weight makes."""

import math

import jax
import jax.numpy as jnp
import pytest
from traces import plain_trace

from cjax.planner.reading.work import work_of
from cjax.planner.work import MatmulWork, elements

ROWS, IN, OUT = 5, 3, 7


def product_of(function, w, x) -> MatmulWork:
    def loss(params, frozen, state, batch, key, index):
        return function(params["w"], batch["x"]).sum(), {}, {}

    (part,) = work_of(plain_trace(loss, params={"w": jnp.ones(w)}, batch={"x": jnp.ones(x)})).parts
    (product,) = part.products
    return product


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda w, x: x @ w, (IN, OUT)),
        (lambda w, x: jnp.einsum("oi,bi->bo", w, x), (OUT, IN)),
        (lambda w, x: jax.lax.dot_general(w, x, (((0,), (1,)), ((), ()))), (IN, OUT)),  # the weight on the left
    ],
)
def test_rows_are_the_activations(function, shape) -> None:
    product = product_of(function, shape, (ROWS, IN))
    sizes = [[size for _, size in dims] for dims in (product.rows, product.inner, product.outer)]
    assert sizes == [[ROWS], [IN], [OUT]]
    assert product.flops == 2 * ROWS * IN * OUT and product.reads == 0


@pytest.mark.parametrize("stride", [1, 2])
def test_zeros_between_inputs_are_not_multiplied(stride: int) -> None:
    """Of a transposed convolution, each place of the result meets a part of the kernel."""

    def upsampled(w, x):
        return jax.lax.conv_transpose(x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    product = product_of(upsampled, (4, 4, IN, OUT), (ROWS, 6, 6, IN))
    assert elements(product.rows) == ROWS * (6 * stride) ** 2 and elements(product.outer) == OUT
    assert math.prod(size for _, size in product.inner) == IN * 16 // stride**2
