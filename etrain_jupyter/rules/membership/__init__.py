"""Membership rules: which ranks form a generation, and when one leaves, is evicted, or joins."""
