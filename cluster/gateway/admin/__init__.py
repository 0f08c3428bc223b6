"""Calls of operators: status, engine control, faults and fleet events."""
