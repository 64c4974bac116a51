"""Checkpoints: their format on storage, how a state becomes one without holding up training, and which ones are kept."""
