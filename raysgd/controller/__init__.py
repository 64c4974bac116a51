"""The controller: one TrainerActor per Trainer, which decides by pure policies and acts in one place.

`machine`, `policies` and `checkpoints` decide: inputs in, commands out, stepped in tests without Ray. `run` executes the
commands, and `actor` is the Ray actor. The controller imports no framework and opens no pickle of the user.
"""
