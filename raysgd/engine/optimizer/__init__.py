"""The user's optimizer and scheduler, and the shards and master weights that it updates."""
