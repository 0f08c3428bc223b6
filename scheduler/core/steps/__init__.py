"""The rows, steps in flight and changes between plans, and what is learned from the steps that are done."""
