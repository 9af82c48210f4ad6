"""The queue in front of a device: batching rules, measured arrival rates, arrival processes, routing, simulation."""
