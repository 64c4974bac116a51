"""The loop over epochs under `PreTrainer`, `Finetuner`, declarative trainings and `raysgd.functions`. Worker side."""
