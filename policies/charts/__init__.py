"""Charts of policies and profiles, drawn with matplotlib, and the action tables of the dashboard."""
