"""What our docstrings need to be read by mkdocstrings: an extension of its parser, griffe."""

import re
from typing import Any

import griffe


class Docstrings(griffe.Extension):
    """Hands the parser each docstring as `tidied`."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = tidied(obj.docstring.value)


def tidied(text: str) -> str:
    r"""A docstring whose examples are code, and in which two arguments that share a line have one each.

    >>> tidied("Args:\n  low, high: bounds.").splitlines()
    ['Args:', '  low: bounds.', '  high: bounds.']
    >>> tidied(">>> 1 + 1\n2").splitlines()[0]
    '```pycon'
    """
    shared = re.compile(r"^( +)(\w+(?:, \w+)+):( .*(?:\n\1 +.*)*)", re.M)
    text = shared.sub(lambda m: "\n".join(f"{m[1]}{name}:{m[3]}" for name in m[2].split(", ")), text)
    # The rest of a line after `>>>` would be read as Markdown, whose links are in brackets too.
    return re.sub(r"^>>> .*(?:\n.+)*", lambda m: f"```pycon\n{m[0]}\n```", text, flags=re.M)
