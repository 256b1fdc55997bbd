"""How many devices share one model: processes that execute what the planner planned."""
