"""How much each layer gives, found out on the model: what the rules of `symprune.allocate` want to
know of it, and candidates tried on it."""
