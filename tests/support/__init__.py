"""Shared parts of the tests: guards against leftovers, Ray clusters, and readers of the project's documents."""
