"""Which command was meant, and what its end means to the shell."""

import difflib
import importlib.metadata
import os
import sys
from collections.abc import Sequence

import jax

from cjax.train import NotFiniteError

try:
    from cjax.cli.commands import COMMANDS
except ModuleNotFoundError as error:
    # Commands are declared with tyro's types. Without it there is still one thing to say.
    if error.name != "tyro":
        raise
    COMMANDS = {}  # pyright: ignore[reportConstantRedefinition]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit status.

    What the user did wrong ends in one message; CJAX_TRACEBACK=1 shows where it was noticed.

    Args:
        arguments: without the program's name; those of this process if None.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not COMMANDS:
        print('the command line needs tyro and rich: pip install "cjax[cli]"', file=sys.stderr)
        return 1
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: cjax COMMAND ...\n")
        for name, command in COMMANDS.items():
            print(f"  {name:11} {(command.__doc__ or '').splitlines()[0]}")
        print("\ncjax COMMAND --help says more.")
        return 0 if arguments else 2
    name = arguments[0]
    if name == "--version":
        print(f"cjax {importlib.metadata.version('cjax')}, JAX {jax.__version__}")
        return 0
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, 1)
        hint = f"did you mean cjax {near[0]}?" if near else f"there are {', '.join(COMMANDS)}"
        print(f"cjax has no command {name!r}; {hint}", file=sys.stderr)
        return 2
    try:
        return COMMANDS[name].parse(arguments[1:]).run()
    except (ValueError, OSError, ImportError, RuntimeError, MemoryError, NotFiniteError) as error:
        # The kinds that the rooms below raise for users. Whatever else it is, XLA's own errors included, is a bug or
        # a broken machine, and keeps its traceback.
        if os.environ.get("CJAX_TRACEBACK") or isinstance(error, jax.errors.JaxRuntimeError):
            raise
        print(f"cjax {name}: {error}", file=sys.stderr)
        return 1
