"""Model: hypothesis state machines and laws."""
