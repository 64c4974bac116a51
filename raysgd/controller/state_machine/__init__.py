"""The state machine of a run and its parts. Pure: inputs in, commands out."""
