"""Adapters to inference engines; each is imported by name, and imports its engine's framework."""
