"""The controller's side processes: callback host, data holder, placement guard."""
