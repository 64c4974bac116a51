"""raysgd runs as trials of Ray Tune. Importing this package imports Tune; `raysgd.Trainer.to_trainable` does so when called."""

from raysgd._util.imports import uncollected

with uncollected():
    from raysgd.tune_integration.recipe import trial_resources
    from raysgd.tune_integration.search import search

__all__ = ["search", "trial_resources"]
