"""What the tests share: guards against leftovers, the Ray cluster, and readers of the project's own documents."""
