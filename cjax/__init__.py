"""cjax: any Flax model, trained on many devices, in any combination of parallelism, from one call."""

from cjax.mesh import initialize as initialize
from cjax.mesh import simulate as simulate
from cjax.parallelize import parallelize as parallelize
from cjax.plan import Plan as Plan
from cjax.program import Program as Program
from cjax.trace.capture import Mean as Mean
