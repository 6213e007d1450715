"""When to measure, and what that costs."""
