"""``raysgd doctor``: finds what is wrong with this machine, or with each node of a cluster and the network between them."""
