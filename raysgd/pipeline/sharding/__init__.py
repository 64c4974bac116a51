"""How parameters are sharded, from the shapes and the structure of their tree. Any process; importing it loads no JAX."""
