"""The names of other systems, as wrappers over Shoal."""
