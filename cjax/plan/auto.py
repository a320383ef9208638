"""`auto` and the words behind it: a plan that is to be found, and what of it is not to be changed."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from cjax.plan.plan import WALKED, Plan, build
from cjax.plan.text import EXAMPLES, Word, split, underline

WORD = "auto"


@dataclass(frozen=True)
class Auto:
    """What a search for a plan may not change: all words that are not named here are free.

    Precision is the user's own choice: where it is not named, it is float32, as in a plan that is written out.

    Args:
      fixed: by the name of the word, its value.
      text: as it was written.
    """

    fixed: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    text: str = WORD

    def __str__(self) -> str:
        return self.text

    @classmethod
    def parse(cls, text: str) -> "Auto":
        """What `text` fixes: "auto", and behind it words of a plan.

        Raises ValueError with the wrong word underlined and what to write instead.

        >>> Auto.parse("auto precision=bfloat16 tensor=2").fixed["tensor"]
        Tensor(size=2, mode='1d', depth=1)
        """
        assert is_auto(text), "somebody asked for a search that the text does not"
        place = text.index(WORD) + len(WORD)
        rest = " " * place + text[place:]  # so that a word is underlined where it stands in the user's text
        fixed: dict[str, Any] = {}
        for word in split(rest):
            try:
                fixed[word.name] = build(word)
                _check_searched(word, fixed)
            except ValueError as error:
                raise ValueError(underline(text, word.start, word.stop, str(error))) from None
        if fixed.get("data") == -1:
            del fixed["data"]  # the devices that are left: what a search takes anyway
        return cls(MappingProxyType(fixed), " ".join(text.split()))


def _check_searched(word: Word, fixed: Mapping[str, Any]) -> None:
    """A search times steps of one program: what a walk over layers takes it does not know. Nor does it take up words
    that exclude each other."""
    together = {name: fixed[name] for name in ("pipeline", "unroll", "microbatches", "overlap") if name in fixed}
    if word.name in together:
        # What is left open, a search takes as the rest needs it.
        Plan(**{"microbatches": together.get("overlap", 1), **together})
    if word.name in WALKED:
        raise ValueError(
            f"a search does not choose among plans that walk over layers, so {word.name} does not go behind auto; "
            f"write out the plan, such as zero=3 {EXAMPLES[word.name]}"
        )


def is_auto(text: str) -> bool:
    """Whether a plan's text asks for a search: its first word is "auto".

    >>> is_auto("auto"), is_auto("auto zero=1"), is_auto("automatic=1"), is_auto("zero=1 auto")
    (True, True, False, False)
    """
    return re.match(rf"\s*{WORD}(\s|$)", text) is not None
