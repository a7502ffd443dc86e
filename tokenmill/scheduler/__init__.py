"""The scheduler decides what the next step computes: requests, admission, budget, plans. Pure Python, no tensors."""

from tokenmill.scheduler.scheduler import Scheduler
from tokenmill.scheduler.stats import SchedulerStats

__all__ = ["Scheduler", "SchedulerStats"]
