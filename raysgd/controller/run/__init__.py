"""The executor of a run: it carries out the commands of the state machine."""
