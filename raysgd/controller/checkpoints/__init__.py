"""Checkpoint coordination: collecting the parts of each save, committing, retention, memory copies."""
