"""The benchmarks' own package: what is measured, on what, and how it is told. Nothing of raysgd imports it."""
