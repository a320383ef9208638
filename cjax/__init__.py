"""cjax: any Flax model, trained on many devices, in any combination of parallelism, from one call."""

from cjax.attention import attention as attention
from cjax.audit import audit as audit
from cjax.generate import generate as generate
from cjax.mesh import initialize as initialize
from cjax.mesh import simulate as simulate
from cjax.parallelize import parallelize as parallelize
from cjax.plan import Pipeline as Pipeline
from cjax.plan import Plan as Plan
from cjax.plan import Sequence as Sequence
from cjax.plan import Tensor as Tensor
from cjax.plan import Zero as Zero
from cjax.program import MismatchError as MismatchError
from cjax.program import OutOfMemory as OutOfMemory
from cjax.program import Program as Program
from cjax.program import State as State
from cjax.trace.loss import Mean as Mean
