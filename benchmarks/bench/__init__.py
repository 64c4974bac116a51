"""The package of the benchmarks: measures, compared systems, pages. Nothing in raysgd imports it."""
