"""Request sizes: bins and size distributions."""
