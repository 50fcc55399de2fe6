"""A cloud on this machine: EC2, S3, IAM and what a spot cluster needs of AWS, without an account.

Instances are real processes that run their real user-data; their metadata service, their console
and their bill are real too, only their hardware is this machine's. For tests, and for notebooks
that show a spot cluster without an account.

Read in this order: ``imds`` (what an instance may ask about itself).
"""
