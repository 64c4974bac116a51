"""The control plane: one TrainerActor per Trainer, which decides by pure policies and acts in one place.

`machine` (with `states`, `commits`, `failure_policy`) is pure: events in, commands out, stepped in tests without Ray.
`run` executes its commands; `actor` is what Ray sees. Never imports a framework, never opens a user's pickle.
"""
