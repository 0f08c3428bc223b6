"""The planner: it fills the plan of the next step."""
