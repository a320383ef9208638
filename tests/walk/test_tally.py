"""What passes that keep nothing need of a device."""

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cjax.walk.jitted import Jitted
from cjax.walk.tally import Tally


def test_what_is_kept_handed_and_made_adds_up_and_the_most_of_all_programs_counts() -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    split = NamedSharding(mesh, PartitionSpec("data"))
    large, small = (jax.ShapeDtypeStruct((n,), "float32", sharding=split) for n in (512, 2))
    tally = Tally()
    tally.kept = 1000
    program = Jitted(lambda x, y: x + y, mesh)
    outs = tally.run(program, large, large, handed=(large, large))
    assert outs.shape == (512,) and outs.sharding.is_equivalent_to(split, 1)
    assert tally.peak == 1000 + 3 * 4 * 512 // 2 + program.temporary
    most = tally.peak
    tally.run(Jitted(lambda x, y: x + y, mesh, ("x",)), large, large, handed=(large, large))
    assert tally.peak == most, "what is donated is not made again"
    tally.run(Jitted(lambda x: x * 2, mesh), small)
    assert tally.peak == most
