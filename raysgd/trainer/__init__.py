"""The driver's side: `Trainer`, the stream of a run's results, the files of finished runs. Imports no framework."""
