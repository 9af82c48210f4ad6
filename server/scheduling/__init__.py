"""Scheduling: admission, queues, dispatchers and the controller that adapts their policies."""
