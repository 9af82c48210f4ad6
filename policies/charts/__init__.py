"""Charts of policies and profiles; the part that needs matplotlib."""
