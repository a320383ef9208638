"""Programs of a walk: what was compiled ahead runs, and the first run of each is alone."""

import threading

import jax
import jax.numpy as jnp

from cjax.mesh import build_mesh, moving
from cjax.walk.jitted import Jitted


def test_the_first_run_of_each_program_waits_for_what_moves() -> None:
    run = Jitted(lambda x: x + 1, build_mesh({}, jax.devices()[:1]))
    goes_on, begun, done = threading.Event(), threading.Event(), list[float]()

    def move() -> None:
        with moving():
            begun.set()
            goes_on.wait(10)

    def called(x: jax.Array) -> threading.Thread:
        thread = threading.Thread(target=lambda: done.append(float(run(x)[0])), daemon=True)
        thread.start()
        thread.join(0.2)
        return thread

    def while_moving(x: jax.Array) -> bool:
        """Whether it ran meanwhile."""
        goes_on.clear(), begun.clear()
        mover = threading.Thread(target=move, daemon=True)
        mover.start()
        begun.wait(10)
        before = len(done)
        thread = called(x)
        ran = len(done) > before
        goes_on.set()
        for each in (thread, mover):
            each.join(10)
        return ran

    assert not while_moving(jnp.ones(2)) and while_moving(jnp.ones(2))
    assert not while_moving(jnp.ones(3)), "other shapes are another program"
    run.compile(jax.ShapeDtypeStruct((4,), jnp.float32))
    assert not while_moving(jnp.ones(4)) and while_moving(jnp.zeros(4))
    assert done == [2.0, 2.0, 2.0, 2.0, 1.0]
