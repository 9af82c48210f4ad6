"""Serves: a gateway that queues, a dispatcher that asks the policy, an executor that runs batches."""
