"""Adaptation: detection of profile drift, refits, and control of the response-time objective."""
