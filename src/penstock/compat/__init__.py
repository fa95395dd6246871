"""Other people's interfaces, kept as they are."""
