"""The worker side of raysgd: what train_func calls, and how that leaves the worker.

`api` holds the public functions, `context` the session they act on, `outbox` the way out. Nothing here imports Ray or
a framework: a session talks to its controller through the `Link` protocol, to storage through `raysgd.checkpoint`.
"""
