"""Which command was meant, and what its end means to the shell."""

import difflib
import importlib.util
import os
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit status.

    What the user did wrong ends in one message; CJAX_TRACEBACK=1 shows where it was noticed.

    Args:
        arguments: without the program's name; those of this process if None.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if missing := [name for name in ("tyro", "rich") if importlib.util.find_spec(name) is None]:
        print(f'the command line needs {" and ".join(missing)}: pip install "cjax[cli]"', file=sys.stderr)
        return 1
    from cjax.cli.commands import COMMANDS  # declared with tyro's types, so only now that it is there

    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: cjax COMMAND ...\n")
        for name, command in COMMANDS.items():
            print(f"  {name:8} {(command.__doc__ or '').splitlines()[0]}")
        print("\ncjax COMMAND --help says more.")
        return 0 if arguments else 2
    name = arguments[0]
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, 1)
        hint = f"did you mean cjax {near[0]}?" if near else f"there are {', '.join(COMMANDS)}"
        print(f"cjax has no command {name!r}; {hint}", file=sys.stderr)
        return 2
    try:
        return COMMANDS[name].parse(arguments[1:]).run()
    except (ValueError, TypeError, OSError, ImportError, RuntimeError, ArithmeticError) as error:
        # The kinds that the rooms below raise for users. A bug of ours is an AssertionError, and keeps its traceback.
        if os.environ.get("CJAX_TRACEBACK"):
            raise
        print(f"cjax {name}: {error}", file=sys.stderr)
        return 1
