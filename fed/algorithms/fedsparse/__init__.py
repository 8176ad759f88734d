"""The EM view: priors on weights, gates that are learned."""
