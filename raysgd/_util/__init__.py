"""Small modules that every layer may import. They import nothing of raysgd except `raysgd.errors`."""
