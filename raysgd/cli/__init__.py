"""The command ``raysgd``. Each sub-command is a module, whose heavy imports wait until the command runs."""
