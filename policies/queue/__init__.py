"""The queue in front of one device: its rules, its measured rate, its arrivals, its simulation."""
