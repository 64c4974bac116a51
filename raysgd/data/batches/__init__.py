"""Batches for the training loop: iteration, and the tensors of each framework."""
