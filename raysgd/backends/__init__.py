"""Process groups: how the workers of an attempt find each other and how they part again. Nothing else.

`base` is the contract, `registry` the way from a name to a config; a framework is imported only in the worker process,
by the backend's `load`.
"""
