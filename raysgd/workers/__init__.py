"""The worker processes and their group.

`process` runs in the workers; `group`, `placement` and `liveness` run in the TrainerActor, which controls the group.
"""
