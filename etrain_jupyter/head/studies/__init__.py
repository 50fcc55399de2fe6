"""Studies: searches over hyper-parameters, whose trials are jobs of the coordinator."""
