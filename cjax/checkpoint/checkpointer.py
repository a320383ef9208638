"""The checkpoints of one run: written behind the training's back, the oldest removed."""

import concurrent.futures
import errno
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from cjax.checkpoint.description import as_folder, checkpoint_steps, folder_of
from cjax.checkpoint.replacing import remove_older, settle_all
from cjax.checkpoint.rows import Rows
from cjax.checkpoint.storage import meet, restore, start_writing
from cjax.mesh import own_context, together
from cjax.tree import PyTree


class Checkpointer:
    """Checkpoints by step in one folder.

    With several processes each makes the same calls, on a folder that all of them see.

    Args:
        folder: where they go; made when the first is written.
        keep: how many stay, the one that was written last among them, whatever its step; None keeps all.

    Raises:
        ValueError: `keep` is neither None nor a whole number of at least 1.

    >>> import tempfile, numpy as np
    >>> with tempfile.TemporaryDirectory() as folder, Checkpointer(folder, keep=2) as checkpoints:
    ...     checkpoints.save(10, {"params": {"w": np.ones(3)}}, {"plan": "tensor=4"})
    ...     tree, meta = checkpoints.restore(None, {"params": {"w": np.zeros(3)}})
    >>> tree["params"]["w"].tolist(), meta["plan"]
    ([1.0, 1.0, 1.0], 'tensor=4')
    """

    def __init__(self, folder: str | Path, keep: int | None = 3):
        if keep is not None and (not isinstance(keep, int) or keep < 1):
            raise ValueError(f"keep is {keep!r}; at least one checkpoint must stay: write keep=1, or None for all")
        self.folder = as_folder(folder)
        self._keep = keep
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
        self._pending: concurrent.futures.Future[None] | None = None

    @own_context
    def save(
        self, step: int, tree: PyTree, meta: Mapping[str, Any], wait: bool = False, rows: Rows | None = None
    ) -> None:
        """Writes a checkpoint; returns when the arrays may be donated, which is before they are on disk.

        Args:
            step: its name, at least 0.
            tree: arrays, sharded or not, random keys and numbers, in any containers.
            meta: what else to keep, in JSON's types; `plan` is shown by `inspect`.
            wait: return when it is on disk.
            rows: as of `cjax.checkpoint.save`; they are written before this returns.

        Raises:
            OSError: this or the previous one could not be written: a full disk, say. Earlier ones are whole.
            ValueError: a step below 0 or no whole number; and what `cjax.checkpoint.save` refuses.
        """
        if isinstance(step, bool) or not isinstance(step, int | np.integer) or step < 0:
            raise ValueError(f"a checkpoint is named by its step, a whole number of at least 0, not {step!r}")
        self.wait()
        try:
            with together("put in order what a kill left", self.folder):
                if jax.process_index() == 0:
                    settle_all(self.folder)
            finish = start_writing(self.folder / str(step), int(step), tree, meta, rows)
        except OSError as error:
            raise self._with_last(error) from error
        self._pending = self._thread.submit(self._finish, finish, int(step))
        if wait:
            self.wait()

    def _finish(self, finish: Callable[[], None], step: int) -> None:
        with jax.transfer_guard("allow"):  # a thread of its own has the guard that JAX was configured with
            finish()
        if self._keep is not None and jax.process_index() == 0:
            remove_older(self.folder, self._keep, step)

    def wait(self) -> None:
        """Returns when the last checkpoint is on disk.

        Raises:
            OSError: it could not be written.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        error = pending.exception()
        meet()
        if isinstance(error, OSError):
            raise self._with_last(error) from error
        if error is not None:
            raise error

    def _with_last(self, error: OSError) -> OSError:
        last = self.latest()
        whole = "there is no earlier one" if last is None else f"the last whole one is {self._place(last)}"
        return OSError(error.errno or errno.EIO, f"{error.strerror or error}; {whole}")

    def _place(self, step: int) -> Path:
        return folder_of(self.folder / str(step))

    def latest(self) -> int | None:
        """The last step that has a whole checkpoint; None before the first."""
        return max(checkpoint_steps(self.folder), default=None)

    def restore(self, step: int | None, abstract: PyTree, ignore: Sequence[str] = ()) -> tuple[PyTree, dict[str, Any]]:
        """The arrays and the meta data of a step, or of the latest: `cjax.checkpoint.restore`, which see.

        Raises:
            FileNotFoundError: there is none, with the steps that exist.
            ValueError: it is of another model, or damaged.
        """
        return restore(self.place(step), abstract, ignore)

    def place(self, step: int | None = None) -> Path:
        """The folder of a step, or of the latest.

        Raises:
            FileNotFoundError: there is none, with the steps that exist.
        """
        self.wait()
        steps = checkpoint_steps(self.folder)
        if not steps or step not in (None, *steps):
            wanted = "" if step is None else f" of step {step}"
            exist = ", ".join(map(str, steps)) or "none"
            raise FileNotFoundError(f"there is no checkpoint{wanted} in {self.folder}; steps that exist: {exist}")
        return self.folder / str(steps[-1] if step is None else step)

    def close(self) -> None:
        """Waits for the last checkpoint, and ends the thread that writes them."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
