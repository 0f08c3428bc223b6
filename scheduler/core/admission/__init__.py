"""Checks and forecasts that decide whether a request is accepted."""
