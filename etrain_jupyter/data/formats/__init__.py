"""Readers of the formats: each indexes the blocks of its files, and decodes a block's bytes."""
