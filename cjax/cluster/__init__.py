"""Many jobs on one cluster: started, submitted to, asked, and ended again; the service behind it needs no JAX."""

from cjax.cluster.client import logs, resize, status, stop, submit
from cjax.cluster.start import start

__all__ = ["logs", "resize", "start", "status", "stop", "submit"]
