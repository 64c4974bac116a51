"""What the time of a run was used for, and which causes made it slow: `raysgd why`. Pure, from the run's events."""
