"""Sample rules: batch plans, shards, and the exactly-once ledger."""
