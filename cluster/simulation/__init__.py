"""A fleet in simulated time: the scheduler, router, autoscaler and controller's plan that serve, on one clock.

Only what takes time is simulated: the ranks, by a `StepTime`, and the start of a replica.
"""
