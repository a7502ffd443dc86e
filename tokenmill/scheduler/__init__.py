"""Which tokens are computed next: sequences, queue, budget, plan and apply. Pure Python, no tensors."""

from tokenmill.scheduler.scheduler import Scheduler
from tokenmill.scheduler.stats import SchedulerStats

__all__ = ["Scheduler", "SchedulerStats"]
