"""Inputs and outputs of one step."""
