"""Liveness of workers as seen from their nodes: node agents, memory use, stacks, causes of death."""
