"""Rows on the worker: readers of tables, files and items, their columns and blocks, prefetching."""
