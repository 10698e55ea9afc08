"""Blocks of KV memory: who holds them, which prefixes they cache."""
