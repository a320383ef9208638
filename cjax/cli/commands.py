"""The commands by name."""

from cjax.cli.calibrate import CalibrateCommand
from cjax.cli.check import Check
from cjax.cli.check_model import CheckModel
from cjax.cli.cluster import ClusterCommand, Submit
from cjax.cli.generate import Generate
from cjax.cli.inspect import Inspect
from cjax.cli.job import Resize, StatusCommand
from cjax.cli.plan import PlanCommand
from cjax.cli.replay import ReplayCommand
from cjax.cli.report import ReportCommand
from cjax.cli.run import Run
from cjax.cli.train import Train

COMMANDS = {
    "train": Train,
    "plan": PlanCommand,
    "generate": Generate,
    "run": Run,
    "status": StatusCommand,
    "resize": Resize,
    "submit": Submit,
    "cluster": ClusterCommand,
    "replay": ReplayCommand,
    "check": Check,
    "check-model": CheckModel,
    "inspect": Inspect,
    "report": ReportCommand,
    "calibrate": CalibrateCommand,
}
