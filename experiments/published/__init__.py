"""Published training runs: their rows as works and plans, the fit of the planner's constants on them, and checks."""
