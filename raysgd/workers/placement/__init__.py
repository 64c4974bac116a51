"""Placement of workers: the cluster's capacity, worker slots in placement groups, nodes to avoid."""
