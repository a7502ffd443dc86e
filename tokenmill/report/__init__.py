"""Charts and HTML pages that benchmark and planner reports are made of."""
