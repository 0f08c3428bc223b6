"""The control plane, pure Python: it owns every block, plans every step and knows no clock of its own."""
