"""Sequences and beam groups: the units that the scheduler schedules."""
