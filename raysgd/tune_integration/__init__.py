"""raysgd runs as trials of Ray Tune. Importing this imports Tune; `raysgd.Trainer.to_trainable` does so when it is called."""

from raysgd._util.imports import uncollected

with uncollected():
    from raysgd.tune_integration.recipe import trial_resources
    from raysgd.tune_integration.searching import search
    from raysgd.tune_integration.trainable import make_trainable

__all__ = ["make_trainable", "search", "trial_resources"]
