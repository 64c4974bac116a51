"""The worker group as the TrainerActor controls it; `group.WorkerGroup` has its other modules as parts."""
