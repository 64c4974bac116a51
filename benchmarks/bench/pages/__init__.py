"""The pages of the benchmarks: their rows, methods, and reasons for missed targets. Pure."""
