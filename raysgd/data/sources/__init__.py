"""Datasets that ``run(dataset=...)`` accepts, and how the driver describes them for the workers."""
