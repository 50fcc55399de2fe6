"""Create, check and remove what a pool of kind ``aws-spot`` needs in an AWS account."""
