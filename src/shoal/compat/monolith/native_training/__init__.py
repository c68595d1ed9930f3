"""Monolith's tables under its modules' names: `monolith.native_training` is this package."""
