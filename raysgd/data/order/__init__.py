"""The order of an epoch's rows, which rank takes which of them, and the position of training in the order."""
