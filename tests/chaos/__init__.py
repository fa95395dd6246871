"""Chaos: place x manner of death, and the end state that must follow."""
