"""Request sizes: bins, size distributions and prediction of service times."""
