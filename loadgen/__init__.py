"""Open-loop load generator for a server, or for a simulation of it, with a report of the run."""
