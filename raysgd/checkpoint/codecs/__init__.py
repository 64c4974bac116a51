"""How a state becomes JSON and tensors, and how it is restored: one codec per library."""
