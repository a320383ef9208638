"""cjax: any Flax model, trained on many devices, in any combination of parallelism, from one call."""

import importlib as _importlib
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from cjax.attention import attention as attention
from cjax.audit import audit as audit
from cjax.calibrate import calibrate as calibrate
from cjax.generate import generate as generate
from cjax.machines import Cluster as Cluster
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
from cjax.streamed import StreamedModel as StreamedModel
from cjax.trace.author.loss import Mean as Mean

if _TYPE_CHECKING:
    from cjax import checkpoint as checkpoint
    from cjax import cluster as cluster
    from cjax import data as data
    from cjax import models as models
    from cjax import optim as optim
    from cjax import pipeline as pipeline
    from cjax import train as train
    from cjax.program.plans import Plans as Plans
    from cjax.program.plans import plans as plans

__version__ = "0.1.0"

# Imported when they are first asked for: what only some runs need should not slow down `import cjax`.
_ROOMS = ("checkpoint", "cluster", "data", "models", "optim", "pipeline", "train")


_LATE = {"plans": "cjax.program.plans", "Plans": "cjax.program.plans"}


def __getattr__(name: str) -> _Any:
    if name in _ROOMS:
        return _importlib.import_module(f"cjax.{name}")
    if name in _LATE:
        return getattr(_importlib.import_module(_LATE[name]), name)
    rooms = [] if name.startswith("_") else [_importlib.import_module(f"cjax.{room}") for room in _ROOMS]
    hint = next((f"; there is {room.__name__}.{name}" for room in rooms if hasattr(room, name)), "")
    raise AttributeError(f"module 'cjax' has no attribute {name!r}{hint}")


def __dir__() -> list[str]:
    return sorted({*(name for name in globals() if not name.startswith("_")), *_ROOMS, *_LATE})
