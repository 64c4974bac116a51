"""Small leaf modules without raysgd imports of their own (errors apart)."""
