"""The worker side of raysgd: the functions that train_func calls, and the session behind them.

`api` holds the public functions, `context` the session that they act on, `event_queue` the way out of the process. No module
here imports Ray or a framework. A session reaches its controller through the `Link` protocol, and storage through
`raysgd.checkpoint`.
"""
