"""Draft heads: EAGLE-3 and multi-token prediction."""
