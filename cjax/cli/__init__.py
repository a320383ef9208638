"""The command line: `cjax train | plan | run | check | check-model | inspect`."""

from cjax.cli.main import main

__all__ = ["main"]
