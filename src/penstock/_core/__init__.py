"""The engine: each file imports only files above it in the map of CONTRIBUTING.md."""
