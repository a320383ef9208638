"""float16 scales the loss: which derivatives can't be told."""

from cjax.jax_compat.jaxprs import traceback_of
from cjax.plan import Plan
from cjax.trace.jaxpr.own_derivative import backward, scales
from cjax.trace.jaxpr.primitives import UNKNOWN, Facts, facts_of, name_of
from cjax.trace.jaxpr.tracebacks import place
from cjax.trace.jaxpr.view import every_equation
from cjax.trace.reading import Trace

_NOTHING = (UNKNOWN, Facts())  # is known of kernels and callbacks


def check_scaled(trace: Trace, plan: Plan) -> tuple[str, ...]:
    """What to say of derivatives by hand that can't be read, under float16.

    Raises:
      ValueError: one that makes other numbers of a scaled gradient, such as one that clips it.
    """
    if plan.precision != "float16":
        return ()
    notes = []
    # Of a tangent by hand JAX makes the gradient itself: it is linear, or can't be transposed.
    for eqn in (eqn for eqn in every_equation(trace.closed.jaxpr) if name_of(eqn) == "custom_vjp_call"):
        closed = backward(eqn)
        if closed is None or all(scales(closed, len(eqn.invars))):
            continue
        where = place(traceback_of(eqn))
        unread = sorted({name_of(each) for each in every_equation(closed.jaxpr) if facts_of(each) in _NOTHING})
        if not unread:
            raise ValueError(
                f"precision=float16 scales the loss, and the derivative by hand at {where} makes something else of a "
                "gradient that is so many times as large: it clips or rounds it, say. Write precision=bfloat16, which "
                "scales nothing; or clip gradients in the optimizer, as optax.clip does."
            )
        notes.append(
            f"precision=float16 scales the loss; whether the derivative by hand at {where} scales with it can't be "
            f"read, because of {', '.join(unread)}"
        )
    return tuple(dict.fromkeys(notes))
