"""Rows from other systems, and to them: Parquet, Monolith's dumps, torch embeddings, text."""
