"""Pairs of models and plans in processes of their own, so that one that hangs or aborts is only one more row."""

import contextlib
import json
import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from search.worker import ENVIRONMENT

WORKER = Path(__file__).parent / "worker.py"
PATIENCE = 60  # seconds in which a process that says nothing must have had something to compute
AT_MOST = 1200  # seconds for one pair
MODELS_PER_PROCESS = 25  # JAX keeps much of what it compiled


class Process:
    """One worker. `outcomes(spec, plans)` starts it again as often as it dies."""

    def __init__(self, patience: float = PATIENCE) -> None:
        self.patience, self.jax = patience, ""
        self._process: Any = None
        self._errors: Any = None
        self._listener: Any = None
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._served = 0

    def outcomes(self, spec: Any, plans: Sequence[str], own_init: int | None = None) -> list[dict[str, str]]:
        """For each plan {plan, kind, what}; kind is equal, refused, wrong, error, abort, hang or model (of the model
        itself: its author's own training fails). Under the plan of number `own_init` the program's own init is compared
        too; with none at all (-1) all begin with what the author's makes; with None, with numbers drawn on the host."""
        found: list[dict[str, str]] = []
        while len(found) < len(plans):
            self._start()
            rest = list(plans[len(found) :])
            job = {"spec": spec, "plans": rest, "own_init": None if own_init is None else own_init - len(found)}
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
            began = "model"
            while True:
                line = self._read()
                if line is None:
                    kind, what = self._post_mortem()
                    if began == "model":
                        return found + [{"plan": plan, "kind": "model", "what": what} for plan in rest]
                    found.append({"plan": began, "kind": kind, "what": what})
                    break
                answer = json.loads(line)
                if "began" in answer:
                    began = answer["began"]
                elif "model" in answer:
                    return found + [{"plan": plan, "kind": "model", "what": answer["model"]} for plan in rest]
                elif "done" in answer:
                    break
                elif "kind" in answer:
                    found.append(answer)
        self._served += 1
        if self._served >= MODELS_PER_PROCESS:
            self.close()
        return found

    def _start(self) -> None:
        if self._process is not None:
            return
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._served, self._lines = 0, queue.Queue()
        self._process = subprocess.Popen(
            [sys.executable, str(WORKER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
            text=True, env=os.environ | ENVIRONMENT,
        )  # fmt: skip
        self._listener = threading.Thread(
            target=self._listen, args=(self._process.stdout, self._lines), daemon=True
        )  # fmt: skip
        self._listener.start()
        first = self._read()
        assert first is not None, self._post_mortem()
        self.jax = json.loads(first)["jax"]

    @staticmethod
    def _listen(stream: Any, lines: "queue.Queue[str | None]") -> None:
        for line in stream:
            lines.put(line)
        lines.put(None)

    def _read(self) -> str | None:
        """The next answer, or None where the process is dead, waits for ever or has taken too long."""
        for _ in range(int(AT_MOST // self.patience)):
            before = self._computed()
            try:
                return self._lines.get(timeout=self.patience)
            except queue.Empty:
                # A process that has no turn, on a machine with much to do, does not hang.
                if self._computed() - before < 0.1 and not self._wants_to():
                    return None
        return None

    def _wants_to(self) -> bool:
        """Whether some thread of the process waits for nothing but its turn."""
        stats = Path(f"/proc/{self._process.pid}/task").glob("*/stat")
        return any(stat.read_text().rpartition(")")[2].split()[0] in "RD" for stat in stats)

    def _computed(self) -> float:
        """Seconds of its own that the process has had; all that pass where the system does not tell."""
        stat = Path(f"/proc/{self._process.pid}/stat")
        if not stat.exists():
            return time.monotonic()
        fields = stat.read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _post_mortem(self) -> tuple[str, str]:
        late = self._process.poll() is None and not self._ended()
        self._process.kill()
        self._process.wait()
        self._errors.seek(0)
        text = self._errors.read()
        self._release()
        if late:
            return "hang", f"nothing for {self.patience:.0f} seconds, and nothing computed"
        if "Termination timeout" in text:
            found = re.search(r"Termination timeout for `([\w -]+?) Rendezvous", text)
            return "hang", f"devices wait for ever at different collectives ({found[1] if found else 'unknown'})"
        fatal = [line for line in text.splitlines() if re.match(r"F\d{4}|Fatal|.*Check failed", line)]
        last = (fatal or [line for line in text.splitlines() if line.strip()] or ["no message"])[-1 if not fatal else 0]
        return "abort", re.sub(r"^F\d+ [\d:.]+ +\d+ ", "", last)[:400]

    def _ended(self) -> bool:
        try:
            self._process.wait(2)
        except subprocess.TimeoutExpired:
            return False
        return True

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._release()

    def _release(self) -> None:
        self._process.wait()
        self._listener.join()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            with contextlib.suppress(BrokenPipeError):  # what was written to a process that is dead
                stream.close()
        self._process = None
