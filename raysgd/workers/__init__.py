"""The worker processes: the actor in each, the thread that runs train_func, and the group as its controller holds it.

`actor`, `attempt`, `reset`, `freshness`, `sampler` run in the workers; `group` in the controller; `placement` and `ranks`
are pure arithmetic.
"""
