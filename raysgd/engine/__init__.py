"""The engine: speed-ups and large models for torch, in five lines."""
