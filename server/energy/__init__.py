"""Energy meters."""
