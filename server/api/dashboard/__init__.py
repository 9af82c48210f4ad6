"""The dashboard at `/`."""
