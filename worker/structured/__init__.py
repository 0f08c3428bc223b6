"""Grammars that constrain outputs: compiled once per request, matched on every rank."""
