"""Adaptation: drift of profiles, and objectives for response times."""
