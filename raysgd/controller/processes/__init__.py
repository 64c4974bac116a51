"""Processes next to the TrainerActor: callback host, data holder."""
