"""Batching as a semi-Markov decision process: model, exact closure, solver, tables."""
