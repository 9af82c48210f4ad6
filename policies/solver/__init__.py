"""The semi-Markov decision process of batching: model, exact solver, the papers' relative value iteration."""
