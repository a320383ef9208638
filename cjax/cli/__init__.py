"""The command line: `cjax train | plan | run | check | inspect`."""

from cjax.cli.main import main

__all__ = ["main"]
