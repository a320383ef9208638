"""What cjax found and what a plan costs, for people: text, notebook HTML, fields. Takes plain data."""

from cjax.report.comparison import Candidate, Comparison
from cjax.report.explained import Explained
from cjax.report.ranking import Ranked, Ranking
from cjax.report.step import FlopCount, MemoryUse, ParamRow, Report, StepTime, Transfer
from cjax.report.summary import BlockRow, DimRow, TraceSummary
from cjax.report.walk import ClassUse, PhaseUse, WalkRanking, WalkRow, WalkUse

__all__ = [
    "BlockRow",
    "Candidate",
    "ClassUse",
    "Comparison",
    "DimRow",
    "Explained",
    "FlopCount",
    "MemoryUse",
    "ParamRow",
    "PhaseUse",
    "Ranked",
    "Ranking",
    "Report",
    "StepTime",
    "TraceSummary",
    "Transfer",
    "WalkRanking",
    "WalkRow",
    "WalkUse",
]
