"""The worker process: its actor, the attempt that runs in it, the thread of train_func, and the reset between runs."""
