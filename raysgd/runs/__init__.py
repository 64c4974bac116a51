"""Readers of run folders: how runs are found under a storage path, and how one run is read. Runs anywhere, without Ray."""
