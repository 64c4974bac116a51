"""The policies of a run: what to do after a failure, which workers hang, which are slow. Pure."""
