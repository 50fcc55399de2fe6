"""What runs on a node beside a worker: where it is, what will become of it, what is installed.

Read ``imds`` (the instance metadata service of EC2), then ``notices`` (the machine will be taken),
then ``fingerprint`` (which versions are here, and whether they fit the notebook's).
"""
