"""Lazy datasets: executed by Ray Data while the workers read them."""
