"""The progress display of a run: its state, and the terminal, notebook and plain-text views of it."""
