"""Storage of checkpoints: local disks and ``pyarrow.fs`` file systems, with retries."""
