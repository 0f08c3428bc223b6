"""State of the scheduler: sequences in rows, steps in flight, times and costs."""
