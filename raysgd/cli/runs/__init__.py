"""The commands about runs: list them, show their state and output, control those that are live, and start them again."""
