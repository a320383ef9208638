"""A job that survives: its worker processes watched, ended and started again from outside; needs no JAX."""

from cjax.job.beat import beating
from cjax.job.member import AGAIN, Member, SupersededError, check_current, member
from cjax.job.signals import LeaveAtOnce, leave_when_told

__all__ = [
    "AGAIN",
    "LeaveAtOnce",
    "Member",
    "SupersededError",
    "beating",
    "check_current",
    "leave_when_told",
    "member",
]
