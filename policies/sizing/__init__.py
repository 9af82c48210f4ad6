"""Request sizes: bins and predictions of service times."""
